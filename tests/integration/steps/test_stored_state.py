"""The state of a run as Redis keeps it between steps."""

import ast
import inspect
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

import orjson
import pytest
from redis import Redis
from support.deadlines import until
from support.runs.opened_runs import opened_run
from support.runs.packed_records import hidden, read
from support.runs.scripted_steps import Hands, Script, call, say
from support.runs.tools import broken, look

from stepfleet.orchestrator import (
    Agent,
    AgentState,
    AsyncFleet,
    ErrorPolicy,
    FinishReason,
    MemoryPolicy,
    Message,
)
from stepfleet.orchestrator.agents.agent import criteria_of
from stepfleet.orchestrator.protocol.fold import after_step
from stepfleet.orchestrator.protocol.revision import revise
from stepfleet.orchestrator.records.steps import StepType
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.inline import InlineWorker

LOOK = call(("look", {"what": "a"}), text="looking")


async def test_the_record_of_a_running_agent_has_identity_clocks_counters_and_metadata(
    redis_url: str,
) -> None:
    """STATE-03, TIME-01, RUN-01: read as raw fields of the run's header."""
    parent = str(uuid4())
    async with opened_run(redis_url, LOOK, say("done"), tools=(look,)) as (desk, hands, _):
        run_id = await desk.create(metadata={"ticket": 7}, parent=parent)
        await hands.step(run_id, 0)
        header = await desk.header(run_id)
        events, _ = await desk.runs.events(run_id)
        result = (await desk.stored(run_id)).result()
    slim = orjson.loads(header["slim"])
    assert (slim["agent_id"], slim["parent_agent_id"]) == (run_id, parent)
    assert slim["metadata"] == {"ticket": 7}
    assert (slim["step_count"], slim["current_step"]["has_tool_calls"]) == (1, True)
    assert slim["usage"]["total_tokens"] == slim["session_usage"]["total_tokens"] == 15
    assert slim["info"]["cumulative_execution_seconds"] > 0
    assert (header["status"], header["step"]) == ("in_progress", "1")
    assert int(header["created"]) <= int(header["execution_started"]) <= int(header["updated"])
    assert {event["session_id"] for event in events} == {run_id, slim["info"]["id"], result.run_id}
    assert str(UUID(run_id)) == run_id
    assert desk.opened.keys.run(run_id).endswith(f":run:{run_id}")


async def test_every_step_moves_updated_at_and_leaves_its_outcome_in_the_state(
    redis_url: str,
) -> None:
    """STATE-04, STATE-05: the newest outcome belongs to the newest step."""
    async with opened_run(redis_url, LOOK, LOOK, say("done"), tools=(look,)) as (
        desk,
        hands,
        run_id,
    ):
        before = (await desk.stored(run_id)).state.info.updated_at

        async def clock_has_moved() -> bool:
            return await desk.runs.now() >= before + timedelta(milliseconds=1)

        for step in range(3):
            await until(clock_has_moved, within=60)
            await hands.step(run_id, step)
            stored = await desk.stored(run_id)
            assert stored.state.info.updated_at > before
            before = stored.state.info.updated_at
            outcome = stored.state.last_continuation_outcome
            assert outcome is not None
            assert outcome == stored.log[-1].outcome
            limit = outcome.get_evaluation_for("StepsLimit")
            assert limit is not None
            assert stored.state.step_count == step + 1
            assert limit.context["value"] == stored.log[-1].result.step == step + 1


async def test_values_that_criteria_and_callers_ask_for_are_in_the_state(redis_url: str) -> None:
    """ERR-28, STATE-06: the last error, result and output of a run are kept; tool traces too."""
    script = (call(("look", {"what": "a"}), ("broken", {}), text="trying"),)
    async with opened_run(redis_url, *script, tools=(look, broken)) as (desk, hands, run_id):
        await hands.finish(run_id)
        state = (await desk.stored(run_id)).state
    assert state.last_result == "seen a"
    assert state.last_error is not None
    assert "no luck" in state.last_error
    assert state.last_output == "trying"
    assert [one.tool_name for one in state.tool_results] == ["look", "broken"]


async def test_a_step_is_of_the_type_of_what_happened_in_it(redis_url: str) -> None:
    """STATE-11: tools, a failing tool, an answer."""
    script = (LOOK, call(("look", {"what": "b"}), ("broken", {})), say("done"))
    policy = {"tool": "ignore"}
    async with opened_run(redis_url, *script, tools=(look, broken), error_policy=policy) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        types = [step.type for step in (await desk.stored(run_id)).result().steps]
    assert types == [StepType.TOOL_EXECUTION, StepType.ERROR, StepType.FINAL_RESPONSE]


async def test_criteria_decide_alike_on_the_stored_state_and_on_that_in_memory(
    redis_url: str,
) -> None:
    """CONT-30, CONT-13: a worker that has only the Redis record comes to the same outcome."""
    cut = say("done", finish_reason=FinishReason.LENGTH)
    limits = {
        "error_policy": ErrorPolicy.retry_tool_errors(3),
        "finish_reasons": (FinishReason.LENGTH,),
        "cumulative_timeout": 60.0,
        "budget_usd": 1.0,
    }
    script = (LOOK, call(("broken", {})), cut)
    measured: list[dict[str, Any]] = []
    async with opened_run(redis_url, *script, tools=(look, broken), **limits) as (
        desk,
        hands,
        run_id,
    ):
        for step in range(3):
            report = await Hands(desk, hands.agent).step(run_id, step)
            assert report.verdict is not None
            stored = await desk.stored(run_id)
            state = stored.state
            in_memory = report.verdict.state
            again = state.model_copy(update={"info": state.info.at(in_memory.info.updated_at)})
            outcome = criteria_of(stored.config, hands.agent).evaluate(again)
            assert outcome == report.verdict.outcome == stored.log[-1].outcome
            measured.append({one.criterion: one.context for one in outcome.evaluations})
    assert [one["StepsLimit"]["value"] for one in measured] == [1, 2, 3]
    assert [one["TokenUsageLimit"]["value"] for one in measured] == [15, 30, 45]
    assert [one["BudgetLimit"]["value"] for one in measured] == [0.015, 0.03, 0.045]
    seconds = [one["CumulativeExecutionTimeLimit"]["value"] for one in measured]
    assert 0 < seconds[0] < seconds[1] < seconds[2]
    failures = [one["ErrorPolicyCriterion"] for one in measured]
    assert [one["consecutiveFailures"] for one in failures] == [0, 1, 0]
    assert [one["totalFailures"] for one in failures] == [0, 1, 1]
    assert measured[-1]["FinishReasonCheck"]["finish_reason"] == "length"


async def test_a_reset_state_is_that_of_the_beginning(redis_url: str) -> None:
    """STATE-13: only the system prompt is left, and counters are zero."""
    async with opened_run(
        redis_url, LOOK, say("done"), tools=(look,), instructions="Be brief."
    ) as (desk, hands, run_id):
        created = (await desk.stored(run_id)).state
        await hands.finish(run_id)
        state = (await desk.stored(run_id)).state.reset()
    assert [one.text for one in state.messages] == ["Be brief."]
    assert (state.step_count, state.session_steps, state.usage.total_tokens) == (0, 0, 0)
    assert state.failures.total_failures == 0
    assert state.tool_results == ()
    assert state.last_output is None
    assert state.info.started_at == created.info.started_at
    assert state.info.cumulative_execution_seconds == 0


async def test_a_state_that_is_rebuilt_from_the_log_equals_the_stored_one(redis_url: str) -> None:
    """RUN-11: nothing of a conversation is kept twice; it is a fold over the steps."""
    async with opened_run(redis_url, LOOK, LOOK, say("done"), tools=(look,)) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
        header = await desk.header(run_id)
        revision = revise(stored.state, stored.log, {}, stored.state.info.updated_at)
    behind_input = stored.state.messages[1:]
    assert stored.result().added_messages() == behind_input == revision.state.messages
    others = {name: value for name, value in header.items() if name != "slim"}
    assert "seen a" not in f"{others} {hidden(others)}"
    assert "messages" not in read(header["slim"])


def test_a_conversation_changes_in_one_place() -> None:
    """STATE-07: the fold over the log adds messages; what else names them reads or starts anew."""
    places = {
        "orchestrator/client/copies.py": "a checkpoint's parts, each fact once",
        "orchestrator/client/checkpoints.py": "those parts joined again",
        "orchestrator/protocol/fold.py": "adds what a step added",
        "orchestrator/protocol/serialization.py": "reads a snapshot's messages",
        "orchestrator/store/runs/reading.py": "reads the end of a conversation from its log",
        "orchestrator/protocol/revision.py": "starts the fold with no messages",
        "orchestrator/records/state.py": "`with_message`, and the reset to the system prompt",
        "orchestrator/store/codec.py": "reads a conversation from its log",
        "worker/attempt/fallback.py": "a pruned copy of one request",
        "worker/models/http_model.py": "a copy of one request",
        "orchestrator/agents/answers/contract.py": "a copy of one request",
        "orchestrator/protocol/verdict.py": "a step's progress, its messages being in the log",
        "orchestrator/agents/strategies/reasoner.py": "a copy of one request",
        "orchestrator/agents/strategies/json_mode.py": "a copy of one request",
    }
    root = Path(inspect.getfile(AgentState)).parents[2]
    assert set(_writers(root)) == set(places)


def _writers(root: Path) -> Iterator[str]:
    """Yield the files that make a state, or a changed copy of a record, with other messages."""
    for room in ("orchestrator", "worker"):
        for file in (root / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if _changes_messages(node):
                    yield file.relative_to(root).as_posix()


def _changes_messages(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr="_changed") | ast.Name(id="AgentState")):
            return any(keyword.arg == "messages" for keyword in node.keywords)
        case ast.Call(func=ast.Attribute(attr="model_copy"), keywords=[ast.keyword(value=update)]):
            return _has_messages(update)
        case ast.Call(func=ast.Attribute(attr="of_fields"), args=[fields]):
            return _has_messages(fields)
        case ast.AnnAssign(target=ast.Name(id="update"), value=ast.Dict() as update):
            return _has_messages(update)
    return False


def _has_messages(update: ast.expr) -> bool:
    return isinstance(update, ast.Dict) and any(
        isinstance(key, ast.Constant) and key.value == "messages" for key in update.keys
    )


WRITERS = {"RunSubmission.create", "StepStore.commit", "Control.retry", "RunSubmission.adopt"}
"""A person's words, the fold's messages, a step taken back or a further message, a whole copy."""


class Watched:
    """Watches the stored conversation of runs: who changed it, by what stood on the stack."""

    def __init__(self, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.changes: list[tuple[str, set[str]]] = []
        self.folded: list[list[str]] = []
        self.stored: list[list[str]] = []
        self._client = Redis.from_url(redis_url, decode_responses=True)
        execute = Connection.execute

        async def watched(connection: Connection, *command: Any) -> Any:
            before = self._logs()
            reply = await execute(connection, *command)
            for key, log in self._logs().items():
                run_id = key.split(":")[3]
                # What another task has changed meanwhile is noted by that one's command.
                is_own = any(run_id in str(part) for part in command)
                if is_own and log != before.get(key):
                    self._note(key, before.get(key, {}), log)
            return reply

        def folded(state: AgentState, result: Any, messages: Any, *rest: Any) -> AgentState:
            self.folded.append([one.text for one in messages])
            return after_step(state, result, messages, *rest)

        monkeypatch.setattr(Connection, "execute", watched)
        monkeypatch.setattr("stepfleet.orchestrator.protocol.verdict.after_step", folded)

    def _logs(self) -> dict[str, dict[str, str]]:
        keys = [str(key) for key in self._client.scan_iter("sf:*:run:*:log", count=10_000)]
        logs = {key: cast("dict[str, str]", self._client.hgetall(key)) for key in keys}
        return {
            key: {name: one for name, one in log.items() if not name.startswith("by:")}
            for key, log in logs.items()
        }

    def _note(self, key: str, before: dict[str, str], after: dict[str, str]) -> None:
        frame, names = inspect.currentframe(), set()
        while frame is not None:
            names.add(frame.f_code.co_qualname)
            frame = frame.f_back
        self.changes.append((key, names))
        for number in sorted(after.keys() - before.keys()):
            if number.isdigit() and "StepStore.commit" in names:
                said = read(after[number]).get("messages", ())
                self.stored.append([Message.model_validate(one).text for one in said])


async def test_each_change_of_a_stored_conversation_has_its_one_writer_on_the_stack(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """STATE-07: steps, also under a memory policy; a further message; a retry; a restored run."""
    agent = Agent(
        "watched",
        model=Script([LOOK, call(("broken", {})), say("done")]),
        tools=[look, broken],
        memory=MemoryPolicy(max_messages=3),
    )
    async with (
        AsyncFleet(redis_url) as fleet,
        InlineWorker(load_settings(redis_url=redis_url), [agent]) as worker,
    ):
        seen = Watched(redis_url, monkeypatch)
        run_id = await fleet.submit(agent, "hi")
        await worker.finish(run_id)
        await fleet.runs.retry(run_id)
        await worker.finish(run_id)
        await fleet.runs.send(run_id, "more")
        await worker.finish(run_id)
        copied = await fleet.history.restore(
            await fleet.history.checkpoint(run_id), agent, run_id=str(uuid4())
        )
    unknown = [sorted(names) for _, names in seen.changes if len(WRITERS & names) != 1]
    assert not unknown
    assert set().union(*(WRITERS & names for _, names in seen.changes)) == WRITERS
    assert seen.stored == seen.folded
    assert {key.split(":")[3] for key, _ in seen.changes} == {run_id, copied}
