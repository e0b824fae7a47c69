"""The ledger and budgets against what the providers saw: committed + lost + ambiguous.

Whole steps run on a real Redis, with calls that fail, hang, or are refused, with fallbacks, answers
that middleware refuses, releases, cancels, workers that are lost or stall, and lost replies.
"""

import asyncio
import inspect
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.protocol.mutations import Mutation, texts_with
from support.runs.opened_runs import lease_runs_out
from support.runs.scripted_steps import Crash, Hands, call, say
from support.runs.stored_runs import Bench, bench
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator import (
    LLM,
    Agent,
    CallState,
    LLMResponse,
    Middleware,
    ModelErrorCode,
    ModelRequest,
    tool,
)
from stepfleet.orchestrator.errors import ModelError, ModelTimeoutError, RateLimitError, StoreError
from stepfleet.orchestrator.limits.budgets import NOTHING
from stepfleet.orchestrator.protocol.attempt import Interruption
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.store import lua
from stepfleet.orchestrator.store.admission import basing
from stepfleet.orchestrator.store.ledger import EPOCH
from stepfleet.worker import step
from stepfleet.worker.attempt import made_calls
from stepfleet.worker.models import Models
from stepfleet.worker.runtime.admission.admitted_steps import AdmittedSteps
from stepfleet.worker.runtime.admission.gate import Gate
from stepfleet.worker.step import run_work

FIRST, SECOND, TENANT = "groq:m", "vllm:m", "tenant:acme"
SERVICES = ("groq", "vllm")


@tool
async def look(what: str) -> str:
    """Look."""
    return what


class Doubting(Middleware):
    """Asks twice, or refuses an answer, as the scene says."""

    scene: "Scene"

    async def around_model(self, request: ModelRequest, call_next: Any) -> LLMResponse:
        doubt, self.scene.doubt = self.scene.doubt, ""
        answer: LLMResponse = await call_next(request)
        if doubt == "twice":
            answer = await call_next(request)
        if doubt == "refuses":
            msg = "not good enough"
            raise ValueError(msg)
        return answer


@dataclass
class Provider(LLM):
    """A provider that does what the scene has planned for its next call."""

    scene: "Scene"
    name: str

    async def generate(self, request: ModelRequest) -> LLMResponse:
        del request
        return await self.scene.called(self.name)


@dataclass
class Scene:
    """One run, the workers that do it, and what the providers saw."""

    desk: Bench
    run_id: str = ""
    plans: dict[str, list[str]] = field(default_factory=dict)
    doubt: str = ""
    lossy: bool = False
    asked: int = 0
    maybe_paid: int = 0
    without_call: int = 0
    """Workers that were lost before a call, or behind one that was refused: it looks open."""
    is_paid: bool = False
    """Whether the newest call was."""
    is_exact: bool = True
    """Whether no worker was lost between its commit and what ends its grant."""
    leases: list[Any] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)

    def lose_replies(self) -> None:
        """Have each script called again where replies are lost."""
        connection: Any = self.desk.opened.connection
        attempt, execute = connection.attempt, connection.execute

        async def attempted(*command: Any) -> Any:
            reply = await attempt(*command)
            if self.lossy:
                raise StoreError("its reply is lost")
            return reply

        async def executed(*command: Any) -> Any:
            reply = await execute(*command)
            return await execute(*command) if self.lossy and command[0] == "EVALSHA" else reply

        connection.attempt, connection.execute = attempted, executed

    async def called(self, name: str) -> LLMResponse:
        plan = self.plans.get(name) or ["looks"]
        what = plan.pop(0)
        self.asked += 1
        self.is_paid = what not in ("500", "429")
        if what == "500":
            raise ModelError("in trouble", retryable=True, code=ModelErrorCode.SERVER_ERROR)
        if what == "429":
            raise RateLimitError("too many", retry_after=0)
        self.maybe_paid += 1
        if what == "hangs":
            raise ModelTimeoutError("no answer")
        if what == "dies":
            raise Crash
        if what in INTERRUPTED:
            (lease,) = self.leases[-1]
            lease.interrupt(INTERRUPTED[what])
            await asyncio.Event().wait()
        if what == "stalls":
            await lease_runs_out(self.desk, self.run_id)
            self.plans.clear()
            await self.step()
            self.is_paid = True
        answer = say("fine") if what == "answers" else call(("look", {"what": "it"}))
        return answer.model_copy(update={"model": name})

    async def step(self, crash_at: str = "") -> None:
        """Let a worker do the run's step; one that dies with it is found lost."""
        stored = await self.desk.stored(self.run_id)
        if stored.state.status.is_terminal:
            return
        providers = {name: partial(Provider, self, name) for name in SERVICES}
        hands = Hands(self.desk, self.desk.agent, crash_at, models=Models(providers=providers))
        steps = await self.admitting()
        ports = replace(hands.ports(), store=steps, admit=steps.admit)
        self.desk.steps._crash = ports.crash
        self.leases.append(hands.leases)
        self.is_paid = False
        try:
            with ports.pacing:
                await run_work(Work(self.run_id, stored.step), ports, hands.leases)
        except Crash:
            self.gates[-1]._pending.clear()
            await self.lose_worker()
        finally:
            self.leases.pop()
        await self.settled()
        key = self.desk.opened.keys.run(self.run_id)
        await self.desk.opened.connection.execute("HDEL", key, "wait")

    async def admitting(self) -> AdmittedSteps:
        """Return the store of a worker of its own."""
        gate = Gate(self.desk.opened, f"w{len(self.gates)}")
        self.gates.append(gate)
        await gate.reload()
        return AdmittedSteps(self.desk.steps, gate, lambda *_: 0.001)

    async def lose_worker(self) -> None:
        key, execute = self.desk.opened.keys.run(self.run_id), self.desk.opened.connection.execute
        token, uncalled = await execute("HMGET", key, "token", "uncalled")
        if not token:
            self.is_exact = False  # it had committed
            return
        is_known = uncalled == token or await execute("HEXISTS", f"{key}:journal", "response")
        if not self.is_paid and not is_known:
            self.without_call += 1
        await lease_runs_out(self.desk, self.run_id)

    async def finish(self) -> None:
        """Bring the run to its end; hints that are late find what workers have left."""
        for _ in range(30):
            self.plans, self.doubt, self.lossy = {"groq": ["answers"]}, "", False
            await self.step()
        last = await self.desk.stored(self.run_id)
        assert last.state.status.is_terminal
        assert self.asked or last.state.status is Lifecycle.CANCELLED, "nobody calls a model"
        steps = await self.admitting()
        for number in range(last.step + 1):
            await steps.claim(Work(self.run_id, number), self.desk.token())
        await self.settled()

    async def settled(self) -> None:
        """Wait for what was sent and is not waited for."""
        await asyncio.sleep(0)  # what is pending goes out
        for gate in self.gates:
            while tasks := set(gate._tasks):
                await asyncio.wait(tasks)

    async def check(self) -> None:
        ledger = self.desk.opened.ledger
        today = await ledger.today()
        sums: Counter[tuple[str, str, str]] = Counter()
        answered: Counter[str] = Counter()
        async for row in ledger.rows(today, today):
            sums[row.state, row.agent, row.model] += row.sums.calls
            if row.state == CallState.COMMITTED:
                answered[row.model] += row.sums.calls
        assert min(sums.values(), default=0) >= 0
        made = sums.total()
        assert made == self.maybe_paid + self.without_call, "each call that was seen, once"
        uses = {one.name: one for one in await self.gates[0].settings.use()}
        [budget] = uses[TENANT].budgets
        assert budget.reserved == 0
        if self.is_exact:
            assert budget.spent == made, "budgets spend what the ledger has"
            for model, name in zip(SERVICES, (FIRST, SECOND), strict=True):
                assert uses[name].budgets[0].spent >= answered[model], "each under its own limits"


INTERRUPTED = {
    "is handed back": Interruption.HANDED_BACK,
    "is cancelled": Interruption.CANCELLED,
}
FAILS = st.sampled_from(["500", "429", "hangs"])
FIRSTS = st.one_of(
    st.just("looks"), FAILS, st.sampled_from(["dies", "stalls", *INTERRUPTED]), FAILS
)
SECONDS = st.sampled_from(["looks", "429", "hangs", "dies", "stalls", *INTERRUPTED])
POINTS = ("", "", "", "after-claim", "after-reply", "after-journal", "commit-applied")
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), FIRSTS, SECONDS, st.sampled_from(POINTS), st.booleans()),
        st.tuples(st.just("step"), FIRSTS, SECONDS, st.sampled_from(POINTS), st.booleans()),
        st.tuples(st.just("doubt"), st.sampled_from(["twice", "refuses"])),
        st.tuples(st.just("cancel")),
    ),
    min_size=1,
    max_size=6,
)


async def play(url: str, operations: list[Any]) -> None:
    doubts = Doubting()
    agent = Agent("plain", model=[FIRST, SECOND], tools=[look], middleware=[doubts], max_steps=40)
    async with bench(url, agent, lease=600, grace=60) as desk:
        await desk.opened.connection.execute("FLUSHDB")
        scene = doubts.scene = Scene(desk)
        gate = Gate(desk.opened, "w")
        scene.gates.append(gate)
        for name in (FIRST, SECOND, TENANT):
            await gate.settings.change(name, {"calls": 1000})
        today = (await desk.opened.ledger.today() - EPOCH).days
        await gate.call(basing(TENANT, NOTHING, NOTHING, today))
        scene.lose_replies()
        scene.run_id = await desk.create(tenant="acme")
        for operation in operations:
            scene.lossy = False
            match operation:
                case ("step", first, second, point, lossy):
                    scene.plans, scene.lossy = {"groq": [first], "vllm": [second]}, lossy
                    await scene.step(point)
                case ("doubt", how):
                    scene.plans, scene.doubt = {}, how
                    await scene.step()
                case _:
                    stored = await desk.stored(scene.run_id)
                    if not stored.state.status.is_terminal:
                        await desk.control.cancel(stored, "no more")
        await scene.finish()
        await scene.check()


def search(url: str, examples: int, phases: list[Phase]) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    @given(OPERATIONS)
    def example(operations: list[Any]) -> None:
        asyncio.run(play(url, operations))

    example()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("examples", [25, pytest.param(200, marks=pytest.mark.long)])
def test_what_providers_saw_is_committed_lost_or_ambiguous(
    redis_server: RedisServer, examples: int
) -> None:
    """COST-09"""
    search(redis_server.url, examples, [Phase.generate, Phase.shrink])


def changed(function: Any, old: str, new: str) -> Any:
    """Return a copy of a function of the worker with a bug."""
    text = dedent(inspect.getsource(function))
    assert text.count(old) >= 1, "the code has changed: so does the seeded bug"
    scope = {**function.__globals__}
    exec(compile(text.replace(old, new), "seeded", "exec"), scope)  # noqa: S102 - our own text
    return scope[function.__name__]


IN_SCRIPTS = {
    "later entries replace earlier ones": Mutation(
        "common", "local n, note = 1 + number(string.match(texts, '^%d+')),", "local n, note = 1,"
    ),
    "a repeated charge is charged again": Mutation(
        "admit", "  if ends.is_done(op) then return 'done' end\n", ""
    ),
    "a lost call is charged with each repetition": Mutation(
        "admit", " and not ends.is_done(op) then", " then"
    ),
    "a repeated settlement ends a newer grant": Mutation(
        "admit", "if held and op.key and held.key and held.key ~= op.key then", "if false then"
    ),
    "another model is called under the first one's grant": Mutation(
        "admit",
        "if held and held.step == op.step and held.of == op.of then return end",
        "do return end",
    ),
    "a worker that is lost is no call": Mutation(
        "common", "tostring(may_have_called(owner, known.uncalled))", "'false'"
    ),
    "a late answer is entered beside its loss": Mutation(
        "common", "  if before then account(batch, entry, before, -1) end\n", ""
    ),
}
IN_CODE: dict[str, tuple[Any, str, str, str]] = {
    "failed calls are entered at the end alone": (
        made_calls,
        "enter_failed",
        "if losses := of_failed_calls(",
        "return\n    if losses := of_failed_calls(",
    ),
    "answers that nobody used are forgotten": (
        step,
        "in_vain",
        "calls += [_in_vain(",
        "() and [_in_vain(",
    ),
    "a second answer is forgotten": (
        made_calls,
        "_others",
        "for one in answers]",
        "for one in ()]",
    ),
    "a refused step has spent nothing": (
        AdmittedSteps,
        "_ending",
        "[settling(hint, Amounts(), spent,",
        "[settling(hint, Amounts(), NOTHING,",
    ),
    "entered calls are not spent": (
        AdmittedSteps,
        "journal",
        "if spent != NOTHING else []",
        "if False else []",
    ),
    "what may be under way is given back with a cancelled run": (
        AdmittedSteps,
        "_unused",
        "if crashes > grant.crashes:",
        "if False:",
    ),
    "a released step spends nothing": (
        AdmittedSteps,
        "_released",
        "[charging(used.names, None, spent)] if",
        "[] if",
    ),
}
EXAMPLES = 400


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", IN_SCRIPTS)
def test_the_ledger_model_finds_bugs_of_scripts(
    name: str, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lua, "source", texts_with(IN_SCRIPTS[name]).__getitem__)
    monkeypatch.setattr(lua, "digest", lua.digest.__wrapped__)
    with pytest.raises((AssertionError, ExceptionGroup)):
        search(redis_server.url, EXAMPLES, [Phase.generate])


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", IN_CODE)
def test_the_ledger_model_finds_bugs_of_workers(
    name: str, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, function, old, new = IN_CODE[name]
    monkeypatch.setattr(where, function, changed(getattr(where, function), old, new))
    with pytest.raises((AssertionError, ExceptionGroup)):
        search(redis_server.url, EXAMPLES, [Phase.generate])
