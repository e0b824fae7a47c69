"""A step from its claim to its commit, over a store in memory and a model that follows a script."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support.runs.fake_store import RUN, FakeStore
from support.runs.scripted_steps import ALONE, Script, call, say

from stepfleet.orchestrator import Agent, ErrorInfo, LLMResponse, ModelRequest, tool
from stepfleet.orchestrator.errors import ModelError, RateLimitError, StoreError
from stepfleet.orchestrator.protocol.claim import Claim, How, Loss, Losses, Refused, Want, Work
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.orchestrator.records.calls.answers import Answer, Awaited, Decision, RunEnd
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.records.run.results import LostKind
from stepfleet.orchestrator.records.steps import StepResult
from stepfleet.orchestrator.tools.middleware import Middleware, NextModel
from stepfleet.worker.agents.local import LocalAgents
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.models import Models
from stepfleet.worker.ports import Ports
from stepfleet.worker.step import Report, run_work
from stepfleet.worker.toolbox.box import LocalToolbox


@dataclass
class Scene:
    """A run of an agent in a store in memory, and what a worker brings for its steps."""

    agent: Agent
    store: FakeStore
    changes: dict[str, Any] = field(default_factory=dict)
    visited: list[str] = field(default_factory=list)
    leases: Leases = field(default_factory=lambda: Leases(lambda: 0.0))
    tokens: "itertools.count[int]" = field(default_factory=itertools.count)

    def ports(self) -> Ports:
        given = Ports(
            store=self.store,
            calls=self.store.calls,
            agent=LocalAgents([self.agent], Models()).find,
            toolbox=LocalToolbox(2),
            cost=lambda _model, usage, *_: usage.total_tokens / 1000,
            jitter=lambda: 0.5,
            token=lambda: f"t{next(self.tokens)}",
            crash=self.visited.append,
            **ALONE,
            worker="test",
        )
        return replace(given, **self.changes)

    async def step(self, number: int) -> Report:
        ports = self.ports()
        with ports.pacing:
            report = await run_work(Work(RUN, number), ports, self.leases)
        assert len(self.leases) == 0
        assert ports.pacing.at_work == 0
        return report

    async def call(self, number: int, index: int) -> Report:
        return await run_work(Work(RUN, number, index), self.ports(), self.leases)

    @property
    def asked(self) -> list[ModelRequest]:
        assert isinstance(self.agent.llm, Script)
        return self.agent.llm.requests

    def script(self, *answers: Any) -> None:
        assert isinstance(self.agent.llm, Script)
        self.agent.llm.answers = answers


def scene(*answers: Any, tools: Sequence[Any] = (), **config: Any) -> Scene:
    agent = Agent("clerk", model=Script(answers), tools=tools, **config)
    return Scene(agent, FakeStore(agent.config))


def verdict_of(report: Report) -> Verdict:
    assert report.verdict is not None
    return report.verdict


def logged(report: Report) -> StepResult:
    step = verdict_of(report).logged
    assert step is not None
    return step.result


Wants = Callable[[Scene], None]


def interrupting(of: Scene, by: Wants, answer: LLMResponse) -> Callable[..., Awaitable[Any]]:
    """Return a model, during whose call something is asked of the run, and a renewal learns it."""

    async def generate(request: ModelRequest) -> LLMResponse:
        by(of)
        await of.leases.renew(renewed(of.store))
        await asyncio.sleep(0)
        return answer

    return generate


def renewed(store: FakeStore) -> Callable[[Any], Awaitable[Any]]:
    async def renew(lease: Any) -> Any:
        return await store.journal(lease.work, 0.0)

    return renew


def wants(what: Want) -> Wants:
    def ask(of: Scene) -> None:
        of.store.want = what

    return ask


def is_lost(of: Scene) -> None:
    of.store.take_over()


def recording(made: list[str], **options: Any) -> Any:
    """Return a tool that notes its calls."""

    @tool(thread=False, **options)
    def look(what: str) -> str:
        """Look."""
        made.append(what)
        return f"saw {what}"

    return look


LOOK = ("look", {"what": "a"})
LOOKS = call(LOOK, ("look", {"what": "b"}))


async def test_an_answer_without_calls_ends_the_run() -> None:
    made = scene(say("done"))
    report = await made.step(0)
    assert report.applied
    assert (verdict_of(report).move, verdict_of(report).stop_reason) == (Move.FINISH, "completed")
    assert [one.content for one in made.store.state.messages] == ["Hi", "done"]
    assert made.store.writes == ["claim", "commit"]
    assert (logged(report).cost_usd, logged(report).worker) == (0.015, "test")
    assert made.visited == [
        *("before-claim", "after-claim", "during-call", "after-reply", "after-tools"),
        *("before-commit", "after-commit"),
    ]


async def test_a_tool_runs_between_journal_and_commit_and_its_result_reaches_the_model() -> None:
    ran: list[str] = []
    made = scene(call(LOOK), say("done"), tools=[recording(ran)])
    first = await made.step(0)
    assert verdict_of(first).move is Move.CONTINUE
    assert made.store.writes == ["claim", "journal", "commit"]
    assert ran == ["a"]
    await made.step(1)
    assert made.store.status == "completed"
    assert [one.content for one in made.asked[1].messages] == ["Hi", "", "saw a"]


@pytest.mark.parametrize("parallel", [True, False])
async def test_two_tools_run_once_each_in_the_order_of_the_calls(parallel: bool) -> None:
    ran: list[str] = []
    made = scene(LOOKS, tools=[recording(ran)], parallel_tool_execution=parallel)
    report = await made.step(0)
    assert ran == ["a", "b"]
    assert made.store.writes == ["claim", "journal", "journal", "commit"]
    results = [one.result for one in logged(report).tool_calls]
    assert results == ["saw a", "saw b"]


async def test_a_step_goes_on_from_its_journal_without_another_call() -> None:
    """What a lost worker has done is neither paid for nor done twice."""
    ran: list[str] = []
    made = scene(say("never"), tools=[recording(ran)])
    record = (await scene_after(LOOKS)).open.results[0]
    made.store.open = replace(
        made.store.open, response=LOOKS, started=frozenset({0}), results={0: record}
    )
    report = await made.step(0)
    assert (made.asked, ran) == ([], ["b"])
    assert [one.result for one in logged(report).tool_calls] == ["saw a", "saw b"]


async def scene_after(answer: LLMResponse) -> FakeStore:
    """Return the store of a worker that was lost behind its first tool's journal."""
    made = scene(answer, tools=[recording([])])
    journal = made.store.journal

    async def once(claim: Claim, seconds: float, **fields: Any) -> Any:
        held = await journal(claim, seconds, **fields)
        if fields.get("results"):
            raise StoreError("gone")
        return held

    made.changes["store"] = store = Overriding(made.store, once)
    with pytest.raises(StoreError):
        await made.step(0)
    return store.inner


class Overriding:
    """A store whose journal is another function."""

    def __init__(self, inner: FakeStore, journal: Callable[..., Awaitable[Any]]) -> None:
        self.inner = inner
        self.journal = journal
        self.claim, self.commit, self.note_call = inner.claim, inner.commit, inner.note_call


async def test_a_model_error_is_tried_again_as_the_same_step() -> None:
    made = scene(ModelError("busy", retryable=True))
    report = await made.step(0)
    assert (verdict_of(report).move, verdict_of(report).attempt) == (Move.RETRY, True)
    assert verdict_of(report).delay == 0.75
    assert (made.store.step, made.store.attempts) == (0, 1)
    made.script(say("done"))
    await made.step(0)
    assert made.store.status == "completed"


async def test_a_refusal_for_now_costs_no_attempt() -> None:
    made = scene(RateLimitError("slow down", retry_after=30))
    report = await made.step(0)
    assert (verdict_of(report).attempt, verdict_of(report).limited) == (False, True)
    assert verdict_of(report).delay >= 30


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (ModelError("no such model", code=ModelErrorCode.MODEL_NOT_FOUND), "MODEL_NOT_FOUND"),
        (ValueError("a bug"), "MODEL_ERROR"),
    ],
)
async def test_a_permanent_error_ends_the_run_with_one_failed_step(
    raised: Exception, code: str
) -> None:
    made = scene(raised)
    report = await made.step(0)
    assert (verdict_of(report).move, made.store.status) == (Move.FINISH, "error")
    assert [one.code for one in logged(report).errors] == [code]


class Twice(Middleware):
    """Calls once more after a failure."""

    async def around_model(self, request: ModelRequest, call_next: NextModel) -> LLMResponse:
        try:
            return await call_next(request)
        except ModelError:
            return await call_next(request)


async def test_a_call_that_may_be_paid_for_is_in_the_ledger_before_the_next_one() -> None:
    made = scene(say("never"), middleware=[Twice()])

    async def generate(_: ModelRequest) -> LLMResponse:
        if len(made.asked) == 1:
            raise ModelError("cut", retryable=True, received=7)
        return say("done")

    made.script(generate)
    report = await made.step(0)
    assert made.store.writes == ["claim", "journal", "commit"]
    (entries,) = made.store.entries
    assert [one.kind for one in entries.failed] == [LostKind.FAILED]
    assert entries.failed[0].tokens >= 7
    assert verdict_of(report).failed == ()
    assert verdict_of(report).state.session_lost.calls == 1


async def test_an_answer_that_nobody_uses_is_in_the_ledger() -> None:
    """The agent's own code throws it away: it was paid for all the same."""

    class Refusing(Middleware):
        async def around_model(self, request: ModelRequest, call_next: NextModel) -> LLMResponse:
            await call_next(request)
            raise ValueError("not like this")

    made = scene(say("paid"), middleware=[Refusing()])
    report = await made.step(0)
    (entry,) = verdict_of(report).failed
    assert (entry.kind, entry.code, entry.tokens) == (LostKind.FAILED, "UNUSED_ANSWER", 15)
    assert made.store.status == "error"


async def test_a_lease_that_is_lost_during_the_call_lets_the_commit_do_nothing() -> None:
    ran: list[str] = []
    made = scene(say("never"), tools=[recording(ran)])
    made.script(interrupting(made, is_lost, call(LOOK)))
    report = await made.step(0)
    assert not report.applied
    assert verdict_of(report).move is Move.RELEASE
    assert (made.store.verdicts, ran) == ([], [])


async def test_a_lease_that_is_lost_at_the_commit_writes_nothing() -> None:
    made = scene(say("done"))

    def crash(point: str) -> None:
        if point == "before-commit":
            made.store.take_over()

    made.changes["crash"] = crash
    report = await made.step(0)
    assert not report.applied
    assert (made.store.step, made.store.verdicts) == (0, [])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"step": 1}, Refused.STALE),
        ({"status": "completed"}, Refused.ENDED),
        ({"status": "paused"}, Refused.PAUSED),
        ({"token": "another"}, Refused.LEASED),
        ({"waits": {0: "gpu"}}, Refused.EARLY),
    ],
)
async def test_a_step_that_is_not_to_be_done_is_refused(
    change: dict[str, Any], why: Refused
) -> None:
    made = scene(say("never"))
    for name, value in change.items():
        setattr(made.store, name, value)
    report = await made.step(0)
    assert report.refusal is not None
    assert (report.refusal.why, made.asked) == (why, [])
    assert made.store.writes == ["claim"]


async def test_a_claim_whose_task_is_cancelled_goes_back() -> None:
    made, claimed = scene(say("never")), asyncio.Event()
    claim = made.store.claim

    async def slow(hint: Work, token: str) -> Any:
        found = await claim(hint, token)
        if not claimed.is_set():
            claimed.set()
            await asyncio.Event().wait()
        return found

    store = Overriding(made.store, made.store.journal)
    store.claim, made.changes["store"] = slow, store
    task = asyncio.create_task(made.step(0))
    await claimed.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await made.leases.settle(1)
    assert [one.move for one in made.store.verdicts] == [Move.RELEASE]
    assert made.store.token == ""


async def test_a_pause_that_is_asked_during_the_call_begins_behind_the_step() -> None:
    made = scene(say("never"))
    made.script(interrupting(made, wants(Want.PAUSE), say("done", finish_reason="pause")))
    report = await made.step(0)
    assert (verdict_of(report).move, made.store.status) == (Move.CONTINUE, "paused")


async def test_a_pause_lets_no_further_tool_start() -> None:
    """It goes on from its journal, when it is resumed."""
    ran: list[str] = []
    made = scene(call(LOOK), tools=[recording(ran)])
    made.store.want = Want.PAUSE
    report = await made.step(0)
    assert (verdict_of(report).move, ran) == (Move.WAIT, [])
    assert made.store.status == "paused"
    made.store.want, made.store.status = "", "in_progress"
    await made.step(0)
    assert (ran, len(made.asked), made.store.step) == (["a"], 1, 1)


async def test_a_cancel_during_the_call_ends_the_run_and_the_ledger_has_the_call() -> None:
    made = scene(say("never"))
    made.script(interrupting(made, wants(Want.CANCEL), say("late")))
    report = await made.step(0)
    assert (verdict_of(report).move, made.store.status) == (Move.FINISH, "user_requested")
    lost = verdict_of(report).lost
    assert lost is not None
    assert lost.ambiguous
    assert verdict_of(report).logged is None


async def test_a_cancel_that_comes_before_the_commit_is_decided_once_more() -> None:
    made = scene(call(LOOK), tools=[recording([])])
    visited = made.visited.append

    def crash(point: str) -> None:
        visited(point)
        if point == "before-commit":
            made.store.want = Want.CANCEL

    made.changes["crash"] = crash
    report = await made.step(0)
    assert made.visited.count("before-commit") == 2
    assert (verdict_of(report).move, made.store.status) == (Move.FINISH, "user_requested")
    assert verdict_of(report).logged is not None


async def test_what_a_stopping_worker_has_paid_for_is_journaled_for_the_next_one() -> None:
    started = asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        started.set()
        await asyncio.Event().wait()
        return "never"

    made = scene(call(("wait", {})), tools=[wait])
    task = asyncio.create_task(made.step(0))
    await started.wait()
    made.leases.hand_back()
    report = await task
    assert verdict_of(report).move is Move.RELEASE
    assert made.store.open.response is not None
    assert (made.store.open.started, made.store.token) == (frozenset({0}), "")


async def test_an_answer_whose_quick_tools_needed_no_journal_is_journaled_when_it_stops() -> None:
    ran: list[str] = []

    @tool(thread=False, read_only=True)
    def look(what: str) -> str:
        """Look; the worker is told to stop meanwhile."""
        made.leases.hand_back()
        ran.append(what)
        return f"saw {what}"

    made = scene(LOOKS, tools=[look], parallel_tool_execution=False)
    report = await made.step(0)
    assert (verdict_of(report).move, ran) == (Move.RELEASE, ["a"])
    assert made.store.open.response is not None
    assert [one.result for one in made.store.open.results.values()] == ["saw a"]
    assert made.store.writes == ["claim", "journal", "commit"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"max_steps": 1}, "steps_limit"),
        ({"budget_usd": 0.01}, "guard"),
        ({"token_limit": 10}, "token_limit"),
    ],
)
async def test_a_limit_ends_the_run_behind_the_step_that_reaches_it(
    config: dict[str, Any], reason: str
) -> None:
    made = scene(call(LOOK), tools=[recording([])], **config)
    report = await made.step(0)
    assert verdict_of(report).logged is not None
    assert (verdict_of(report).move, made.store.status) == (Move.FINISH, reason)


async def test_a_limit_that_was_reached_before_prevents_the_call() -> None:
    made = scene(say("never"), max_steps=1)
    made.store.state = made.store.state.model_copy(update={"step_count": 1, "session_steps": 1})
    made.store.step = 1
    report = await made.step(1)
    assert (made.asked, made.store.status) == ([], "steps_limit")
    assert verdict_of(report).logged is None


async def test_a_step_that_ends_its_workers_is_given_up() -> None:
    made = scene(say("never"))
    known = tuple(Loss(f"t{n}", How.ALONE, 1) for n in range(3))
    made.store.losses = Losses(3, known)
    report = await made.step(0)
    assert (made.asked, made.store.status) == ([], "error")
    assert "ended its worker 3 times" in (verdict_of(report).error or "")


async def test_work_that_an_isolated_process_takes_is_not_done_here() -> None:
    made = scene(say("never"))
    made.store.losses = Losses(1)

    async def takes(lease: Any, ports: Ports) -> bool:
        return True

    made.changes["isolation"] = takes
    report = await made.step(0)
    assert (report.isolated, made.asked, made.store.verdicts) == (True, [], [])


async def test_a_heavy_tool_is_a_task_of_its_own_and_the_step_waits_for_it() -> None:
    ran: list[str] = []
    made = scene(call(LOOK), say("done"), tools=[recording(ran, queue="gpu")])
    report = await made.step(0)
    assert (verdict_of(report).move, made.store.waits, ran) == (Move.WAIT, {0: "gpu"}, [])
    done = await made.call(0, 0)
    assert done.applied
    assert done.record is not None
    assert (done.record.result, ran) == ("saw a", ["a"])
    again = await made.call(0, 0)
    assert again.refusal is not None
    assert again.refusal.why is Refused.STALE
    await made.step(0)
    await made.step(1)
    assert (made.store.status, len(made.asked)) == ("completed", 2)


async def test_a_call_that_waits_for_a_person_is_made_once_it_is_approved() -> None:
    ran: list[str] = []
    made = scene(call(LOOK), tools=[recording(ran, approval=True)])
    attended: list[str] = []

    async def attend(taken: Any, agent: Any) -> float:
        attended.append(taken.place)
        return 60.0

    made.changes["attend"] = {Awaited.APPROVAL: attend}
    await made.step(0)
    assert made.store.waits == {0: Awaited.APPROVAL}
    assert (await made.call(0, 0)).attended
    assert (attended, made.store.calls.left) == ([Awaited.APPROVAL], [Work(RUN, 0, 0)])
    made.store.settle(0, None, Answer(decision=Decision(approved=True, by="Ada")))
    report = await made.step(0)
    assert (ran, len(made.asked)) == (["a"], 1)
    (record,) = logged(report).tool_calls
    assert record.decision is not None
    assert (record.decision.by, record.result) == ("Ada", "saw a")


async def test_a_call_that_waits_for_another_run_gets_its_answer() -> None:
    helper = Agent("helper", model=Script((say("never"),))).as_tool(description="Helps.")
    made = scene(call(("helper", {"task": "a"})), say("done"), tools=[helper])
    await made.step(0)
    assert made.store.waits == {0: Awaited.RUN}
    end = RunEnd(run_id="r.1", agent="helper", status="completed", output="helped")
    made.store.settle(0, None, Answer(run=end))
    report = await made.step(0)
    (record,) = logged(report).tool_calls
    assert record.result == "helped"


async def test_a_call_whose_worker_stops_goes_back_with_its_time() -> None:
    started = asyncio.Event()

    @tool(queue="gpu")
    async def wait() -> str:
        """Wait."""
        started.set()
        await asyncio.Event().wait()
        return "never"

    made = scene(call(("wait", {})), tools=[wait])
    await made.step(0)
    task = asyncio.create_task(made.call(0, 0))
    await started.wait()
    made.leases.hand_back()
    report = await task
    assert (report.record, report.applied) == (None, False)
    assert made.store.calls.left == [Work(RUN, 0, 0)]


async def test_an_agent_that_is_not_here_costs_no_attempt() -> None:
    made = scene(say("never"))
    made.changes["agent"] = LocalAgents([], Models()).find
    report = await made.step(0)
    assert (verdict_of(report).move, verdict_of(report).limited) == (Move.RETRY, True)


async def test_a_held_batch_lets_a_run_wait_that_was_about_to_end_with_an_error() -> None:
    made = scene(ModelError("no such model", code=ModelErrorCode.MODEL_NOT_FOUND))
    made.store.claim_fields["batch_id"] = "b"
    held: list[ErrorInfo] = []

    async def hold(claim: Claim, error: ErrorInfo) -> int:
        held.append(error)
        return 7

    made.changes["hold"] = hold
    report = await made.step(0)
    assert (verdict_of(report).move, verdict_of(report).hold) == (Move.RELEASE, 7)
    assert [one.code for one in held] == [ModelErrorCode.MODEL_NOT_FOUND]


async def test_a_store_that_is_away_leaves_the_step_to_whoever_claims_it_next() -> None:
    made = scene(call(LOOK), tools=[recording([])])

    async def away(*_: Any, **__: Any) -> Any:
        raise StoreError("away")

    made.changes["store"] = Overriding(made.store, away)
    with pytest.raises(StoreError):
        await made.step(0)
    assert (made.store.verdicts, made.store.token) == ([], "t0")
