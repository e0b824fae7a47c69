"""Errors of our code, or of users, behind a claim: a failed step, and no worker that looks lost."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.runs.scripted_steps import Hands, Script, say
from support.runs.stored_runs import Bench, bench

from stepfleet.orchestrator import Agent, ErrorPolicy
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.worker.ports import Ports, StepObserver
from stepfleet.worker.runtime.admission.admitted_steps import AdmittedSteps
from stepfleet.worker.runtime.admission.gate import Gate
from stepfleet.worker.step import run_work

AGENT = Agent("plain", model=Script([say("fine")]), error_policy=ErrorPolicy.stop_on_any_error())


@pytest.fixture
async def desk(redis_url: str) -> AsyncIterator[Bench]:
    async with bench(redis_url, AGENT, lease=600, grace=60) as opened:
        yield opened


def broken(*_: Any, **__: Any) -> Any:
    msg = "unsupported operand"
    raise TypeError(msg)


class Broken(StepObserver):
    """Fails at whatever it sees."""

    claimed = broken
    committed = broken


async def limited(desk: Bench, ports: Ports) -> Ports:
    """Return ports whose admission cannot price a call."""
    gate = Gate(desk.opened, "w1")
    await gate.settings.change("openai:none", {"usd": 5})
    await gate.settings.change("custom:plain", {"usd": 5})
    await gate.settings.change("agent:plain", {"usd": 5})
    await gate.reload()
    return replace(ports, store=AdmittedSteps(desk.steps, gate, broken))


@dataclass(frozen=True)
class Way:
    """Where the error comes up, and whether the step fails with it."""

    change: Callable[[Ports], Ports]
    fails: bool = True


WAYS = {
    "the price of the lost calls": Way(lambda ports: replace(ports, cost=broken)),
    "an observer": Way(lambda ports: replace(ports, observers=(Broken(),)), fails=False),
    "the token counter": Way(lambda ports: replace(ports, tokens=broken)),
    "the jitter": Way(lambda ports: replace(ports, admit=broken)),
}


@pytest.mark.parametrize("name", WAYS)
async def test_an_error_of_code_fails_its_step_and_loses_no_worker(desk: Bench, name: str) -> None:
    way, hands = WAYS[name], Hands(desk, AGENT)
    run_id = await desk.create()
    ports = way.change(hands.ports())
    with ports.pacing:
        report = await run_work(Work(run_id, 0), ports, hands.leases)
    assert report.applied
    run = await desk.stored(run_id)
    header = await desk.header(run_id)
    assert (header["crashes"], header["token"]) == ("0", "")
    assert run.state.status.is_terminal
    error = run.result().error
    assert ("unsupported operand" in str(error)) if way.fails else error is None


async def test_an_error_of_admission_fails_the_step(desk: Bench) -> None:
    hands = Hands(desk, AGENT)
    run_id = await desk.create()
    ports = await limited(desk, hands.ports())
    with ports.pacing:
        report = await run_work(Work(run_id, 0), ports, hands.leases)
    assert report.applied
    assert "unsupported operand" in str((await desk.stored(run_id)).result().error)
    assert (await desk.header(run_id))["crashes"] == "0"


async def test_a_record_that_raises_when_it_is_read_is_given_back(
    desk: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker may read it; nobody was lost with it."""
    run_id = await desk.create()
    await desk.opened.connection.execute("HSET", desk.opened.keys.run(run_id), "attempt", "many")
    refusal = await desk.refused(run_id)
    assert refusal.why.value == "unreadable"
    header = await desk.header(run_id)
    assert (header["token"], header["crashes"], header["limited"]) == ("", "0", "1")
