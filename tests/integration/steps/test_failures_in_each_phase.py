"""Failures of every kind in every phase of a step: recorded, counted, explained, never lost."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from support.deadlines import until
from support.runs.opened_runs import finish_with_waits, lease_runs_out, opened_run
from support.runs.scripted_steps import Crash, Hands, Script, call, say
from support.runs.stored_runs import bench
from support.runs.tools import broken, look
from support.runs.waits import wait_of
from support.servers.raw_model_server import RawModelServer, completion, reply, silence

from stepfleet.orchestrator import (
    Agent,
    AgentBuilder,
    AgentState,
    ErrorHandlingDecision,
    ErrorPolicy,
    ErrorType,
    FinishReason,
    ModelSettings,
    RunStatus,
    StopReason,
    StoreError,
    tool,
)
from stepfleet.orchestrator.errors import ModelError, RateLimitError, ToolTimeoutError
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.records.errors import ErrorContext
from stepfleet.orchestrator.records.steps import StepType
from stepfleet.worker.models.connections import Connections
from stepfleet.worker.models.providers import service_model
from stepfleet.worker.ports import Ports
from stepfleet.worker.step import run_work


@tool
def limited() -> str:
    """Be refused by another service."""
    raise RateLimitError("slow down")


@tool(timeout=0.05)
async def endless() -> str:
    """Never return."""
    await asyncio.Event().wait()
    return "never"


TOOLS = (look, broken, limited, endless)
LOOK = call(("look", {"what": "a"}))
BREAK = call(("broken", {}))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (BREAK, ErrorType.TOOL),
        (call(("limited", {})), ErrorType.RATE_LIMIT),
        (call(("endless", {})), ErrorType.TIMEOUT),
        (call(("look", {"where": "a"})), ErrorType.VALIDATION),
        (ModelError("bad request"), ErrorType.MODEL),
    ],
)
async def test_each_kind_of_failure_is_counted_as_its_type(
    redis_url: str, answer: Any, expected: ErrorType
) -> None:
    """ERR-05: one scripted failure of each type, as the stored state has it."""
    async with opened_run(redis_url, answer, tools=TOOLS) as (desk, hands, run_id):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    assert stored.state.failures.type is expected
    assert stored.result().steps[0].type is StepType.ERROR
    assert stored.result().stop_reason is StopReason.ERROR


async def test_failure_counts_reach_a_fresh_worker(redis_url: str) -> None:
    """ERR-06: fail, ok, fail, fail are 2 in a row and 3 in all, for whoever claims next."""
    script = (BREAK, LOOK, BREAK, BREAK, say("done"))
    policy = ErrorPolicy.retry_tool_errors(5)
    async with opened_run(redis_url, *script, tools=TOOLS, error_policy=policy) as (
        desk,
        hands,
        run_id,
    ):
        for step in range(4):
            await Hands(desk, hands.agent).step(run_id, step)
        failures = (await desk.claim(run_id, 4)).state.failures
    assert (failures.consecutive_failures, failures.total_failures) == (2, 3)


@pytest.mark.parametrize(
    "policy",
    [
        ErrorPolicy.stop_on_any_error(),
        ErrorPolicy.retry_tool_errors(2),
        ErrorPolicy.ignore_tool_errors(),
        ErrorPolicy.retry_all(2),
    ],
)
async def test_under_every_preset_the_model_can_read_what_failed(
    redis_url: str, policy: ErrorPolicy
) -> None:
    """ERR-21: the history has the tool's message, whatever the policy makes of the failure."""
    async with opened_run(redis_url, BREAK, say("done"), tools=TOOLS, error_policy=policy) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        messages = (await desk.stored(run_id)).state.messages
    assert messages[2].is_tool()
    assert "no luck" in messages[2].text


async def test_an_agent_with_another_policy_goes_on_where_the_default_stops(redis_url: str) -> None:
    """ERR-18, ERR-17: `with_error_policy` is fluent and applied, on agents and builders."""
    model = Script((BREAK, say("done")))
    strict = Agent("scripted", model=model, tools=TOOLS)
    patient = strict.with_error_policy(ErrorPolicy.retry_tool_errors(3))
    assert strict.config.error_policy == ErrorPolicy.stop_on_any_error()
    builder = AgentBuilder("scripted").with_model(model).with_tools(*TOOLS)
    changed = builder.with_error_policy(ErrorPolicy.retry_tool_errors(3))
    assert isinstance(changed, AgentBuilder)
    ends = []
    for agent in (strict, patient, builder.build(), changed.build()):
        async with bench(redis_url, agent) as desk:
            run_id = await desk.create()
            await Hands(desk, agent).finish(run_id)
            result = (await desk.stored(run_id)).result()
            ends.append((result.stop_reason, len(result.steps)))
    assert ends == [(StopReason.ERROR, 1), (StopReason.COMPLETED, 2)] * 2


async def test_an_agents_own_resolver_says_what_failed(redis_url: str) -> None:
    """ERR-04: an answer that it takes for a failure is asked for again, as often as is allowed."""

    def doubtful(state: AgentState) -> ErrorContext:
        if state.current_step is None or state.current_step.text != "perhaps":
            return ErrorContext.none()
        return ErrorContext(type=ErrorType.VALIDATION, consecutive_failures=state.step_count)

    model = Script((say("perhaps"),))
    policy = ErrorPolicy.retry_tool_errors(2)
    agent = Agent("scripted", model=model, failures=doubtful, error_policy=policy)
    async with bench(redis_url, agent, lease=600, grace=60) as desk:
        run_id = await desk.create()
        await finish_with_waits(Hands(desk, agent), run_id)
        result = (await desk.stored(run_id)).result()
    assert (result.stop_reason, len(model.requests)) == (StopReason.RETRY_LIMIT, 2)
    assert result.outcome is not None
    decisive = result.outcome.get_evaluation_for("ErrorPolicyCriterion")
    assert decisive is not None
    assert decisive.context["errorType"] == "validation"


async def test_failures_of_the_chosen_type_alone_are_retried(redis_url: str) -> None:
    """ERR-27: timeouts are; the first failure of another type ends the run."""
    policy = (
        ErrorPolicy()
        .with_handling(ErrorType.TIMEOUT, ErrorHandlingDecision.RETRY)
        .with_max_retries(5)
    )
    slow = call(("endless", {}))
    script = (slow, slow, BREAK, say("never"))
    async with opened_run(redis_url, *script, tools=TOOLS, error_policy=policy) as (
        desk,
        hands,
        run_id,
    ):
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
    types = [error.type for step in result.steps for error in step.errors]
    assert types == [ErrorType.TIMEOUT, ErrorType.TIMEOUT, ErrorType.TOOL]
    assert result.stop_reason is StopReason.ERROR


async def test_a_model_that_fails_once_is_asked_again_under_a_policy_that_retries(
    redis_url: str,
) -> None:
    """CONT-29, ERR-29, ERR-31: the retry is a new step, and the run completes."""
    answers = iter([ModelError("bad request"), say("done")])

    async def next_answer(_: Any) -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    policy = ErrorPolicy.retry_all(3)
    async with opened_run(redis_url, next_answer, error_policy=policy) as (desk, hands, run_id):
        await finish_with_waits(hands, run_id, within=60)
        result = (await desk.stored(run_id)).result()
    assert result.success
    assert [step.type for step in result.steps] == [StepType.ERROR, StepType.FINAL_RESPONSE]
    assert [step.step for step in result.steps] == [1, 2]


async def test_lost_workers_are_no_failures_of_the_agent(redis_url: str) -> None:
    """ERR-29, TIME-17: two crashes count as crashes alone, and their time stands apart."""
    async with opened_run(redis_url, LOOK, say("done"), tools=TOOLS) as (desk, hands, run_id):
        for point in ("after-claim", "before-commit"):
            with pytest.raises(Crash):
                await Hands(desk, hands.agent, crash_at=point).step(run_id, 0)
            await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    result = stored.result()
    assert result.success
    assert stored.state.failures.total_failures == 0
    assert [lost.kind for lost in result.lost_attempts] == ["crash", "crash"]
    committed = sum(step.duration_ms for step in result.steps) / 1000
    assert result.cumulative_execution_seconds == pytest.approx(committed)


async def test_the_type_of_several_errors_does_not_depend_on_which_came_first(
    redis_url: str,
) -> None:
    """ERR-30: a hundred runs whose parallel tools fail in random order."""

    @tool
    async def late(kind: str) -> str:
        """Fail after a while."""
        await asyncio.sleep(random.random() / 100)  # so that any of them is the first
        if kind == "timeout":
            raise ToolTimeoutError("too slow")
        raise ValueError(kind)

    calls = call(*(("late", {"kind": kind}) for kind in ("plain", "timeout", "odd")))
    async with opened_run(redis_url, calls, tools=(late,), parallel_tool_execution=True) as (
        desk,
        hands,
        _,
    ):
        run_ids = [await desk.create() for _ in range(100)]
        await asyncio.gather(*(hands.step(run_id, 0) for run_id in run_ids))
        runs = [await desk.stored(run_id) for run_id in run_ids]
    assert {run.state.failures.type for run in runs} == {ErrorType.TIMEOUT}
    assert len({run.result().error for run in runs}) == 1


@dataclass
class FailingPort:
    """A collaborator that fails at its first use, in front of the real one."""

    real: Any
    name: str
    error: Exception
    left: int = 1

    def __getattr__(self, name: str) -> Any:
        if name == self.name and self.left:
            self.left -= 1
            return self._fail
        return getattr(self.real, name)

    async def _fail(self, *_: Any, **__: Any) -> Any:
        raise self.error


Broken = Callable[[Ports], Ports]


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


PHASES: dict[str, Broken] = {
    "load": lambda ports: replace(ports, agent=raising(RuntimeError("phase bug"))),
    "tool": lambda ports: replace(
        ports, toolbox=cast("Any", FailingPort(ports.toolbox, "attempt", RuntimeError("phase bug")))
    ),
    "price": lambda ports: replace(ports, cost=raising(RuntimeError("phase bug"))),
    "journal": lambda ports: replace(
        ports, store=FailingPort(ports.store, "journal", RuntimeError("phase bug"))
    ),
}


@pytest.mark.parametrize("phase", PHASES)
async def test_an_exception_in_any_phase_is_a_recorded_step_with_an_outcome(
    redis_url: str, phase: str
) -> None:
    """ERR-25, ERR-31, ERR-05: of type unknown, with its time and its events."""
    async with opened_run(redis_url, LOOK, say("done"), tools=TOOLS) as (desk, hands, run_id):
        ports = PHASES[phase](hands.ports())
        report = await run_work(Work(run_id, 0), ports, hands.leases)
        assert report.applied
        stored = await desk.stored(run_id)
        events, _ = await desk.runs.events(run_id)
    result = stored.result()
    assert result.stop_reason is StopReason.ERROR
    assert result.status is RunStatus.ERROR
    assert result.error is not None
    assert "phase bug" in result.error
    assert stored.state.failures.type is ErrorType.UNKNOWN
    assert [step.finish_reason for step in result.steps] == [FinishReason.ERROR]
    assert result.outcome is not None
    assert result.outcome.resolved_by == "ErrorPolicyCriterion"
    assert result.cumulative_execution_seconds > 0
    assert [one["type"] for one in events].count("agent.step.completed") == 1
    assert events[-1]["payload"]["status"] == "failed"


async def test_a_commit_that_fails_leaves_the_step_to_be_done_again(redis_url: str) -> None:
    """ERR-25: the last phase, saving; nothing is lost but the attempt."""
    async with opened_run(redis_url, LOOK, say("done"), tools=TOOLS) as (desk, hands, run_id):
        ports = hands.ports()
        failing = FailingPort(ports.store, "commit", StoreError("Redis is out of reach"))
        with pytest.raises(StoreError):
            await run_work(Work(run_id, 0), replace(ports, store=failing), hands.leases)
        assert len(hands.leases) == 0
        await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.success
    assert [step.step for step in result.steps] == [1, 2]


async def test_a_run_whose_agent_no_worker_has_waits_until_its_time_is_up(redis_url: str) -> None:
    """ERR-31: limits and policy are stored with the run; it never counts as completed."""
    async with opened_run(redis_url, say("never"), time_limit=60) as (desk, _, run_id):
        stranger = Hands(desk, Agent("other", model=Script(())))
        report = await stranger.step(run_id, 0)
        assert report.verdict is not None
        assert report.verdict.failure is not None
        assert "--agents" in report.verdict.failure.message
        waiting = await desk.header(run_id)
        assert waiting["status"] == "in_progress"
        began = int(waiting["execution_started"]) - 61_000
        key = desk.opened.keys.run(run_id)
        await desk.opened.connection.execute("HSET", key, "execution_started", began)
        await finish_with_waits(stranger, run_id, within=60)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.TIME_LIMIT
    assert result.steps == ()


@pytest.mark.parametrize(
    ("script", "seconds", "expected", "said"),
    [
        (silence(), 0.2, ErrorType.TIMEOUT, "0.2"),
        (reply(200, {"choices": []}), 60, ErrorType.MODEL, "choices"),
        (reply(200, b"<html>"), 60, ErrorType.MODEL, "JSON"),
    ],
)
async def test_a_model_that_is_silent_or_speaks_nonsense_fails_the_step_and_no_more(
    redis_url: str, script: Any, seconds: float, expected: ErrorType, said: str
) -> None:
    """LLM-09, LLM-17: at the call's own time limit, or by what the body lacks."""
    connections = Connections()
    async with RawModelServer().running() as server:
        server.answers(script, completion("late"))
        settings = ModelSettings(base_url=server.base_url, timeout=seconds)
        model = service_model("openai", connections, environment={})
        agent = Agent("wired", model=model, settings=settings, model_attempts=1)
        async with bench(redis_url, agent) as desk:
            run_id = await desk.create()
            await Hands(desk, agent).finish(run_id)
            stored = await desk.stored(run_id)
        await connections.aclose()
    assert stored.state.failures.type is expected
    assert [step.type for step in stored.result().steps] == [StepType.ERROR]
    assert said in stored.result().steps[0].errors[0].message
    assert said in str(stored.result().error)


async def test_waits_grow_while_a_model_refuses_and_other_runs_are_served(redis_url: str) -> None:
    """ERR-22: the same worker finishes another run before the refused one is due again."""
    refused = RateLimitError("slow down")
    async with opened_run(redis_url, refused) as (desk, hands, run_id):
        waits = []
        for _ in range(2):

            async def is_due() -> bool:
                now = (await desk.runs.now()).timestamp() * 1000
                return bool(now >= (await wait_of(desk, run_id)).get("deadline", 0))

            await until(is_due, within=60)
            report = await hands.step(run_id, 0)
            assert report.verdict is not None
            waits.append(report.verdict.delay)
        other = Agent("scripted", model=Script((say("done"),)))
        another = await desk.create()
        await Hands(desk, other, leases=hands.leases).finish(another)
        assert (await desk.stored(another)).result().success
        assert not (await desk.stored(run_id)).state.status.is_terminal
    assert waits[0] < waits[1]
