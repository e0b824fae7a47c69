"""Steps whose model is out, over a real Redis: they wait aside, probe, and go on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest
from support.runs.opened_runs import lease_runs_out
from support.runs.scripted_steps import Crash, Hands, Script, call, requests, say
from support.runs.stored_runs import Bench, bench, with_settings
from support.runs.waits import let_pass, wait_of

from stepfleet.orchestrator import Agent, RunStatus, tool
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.protocol.claim import Refused
from stepfleet.orchestrator.protocol.revision import revise
from stepfleet.orchestrator.protocol.verdict import circuit_id
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.store.circuits import Circuits
from stepfleet.worker.ports import Ports
from stepfleet.worker.runtime.circuits import CircuitBreaker

SERVICE = "agent waiter's own model"
OF = circuit_id(SERVICE)


class Fleet(Hands):
    """A worker's hands behind a circuit breaker that opens at the first failure."""

    breaker: CircuitBreaker
    outage_patience = 86_400.0

    def ports(self) -> Ports:
        return replace(super().ports(), circuits=self.breaker, outage_patience=self.outage_patience)


def out() -> ModelError:
    return ModelError("no connection", retryable=True, code=ModelErrorCode.CONNECTION_ERROR)


@asynccontextmanager
async def fleet_of(url: str, *answers: Any, **config: Any) -> AsyncIterator[tuple[Bench, Fleet]]:
    """Yield the store, and hands whose model answers like that."""
    agent = Agent("waiter", model=Script(list(answers)), **config)
    async with bench(url, agent, lease=600, grace=60) as desk:
        yield desk, worker(desk, agent)


def worker(desk: Bench, agent: Agent) -> Fleet:
    hands = Fleet(desk, agent)
    hands.breaker = CircuitBreaker(with_settings(desk.opened, rescue_interval=0.0).circuits, 1)
    return hands


def answers_now(hands: Hands, *answers: Any) -> None:
    assert isinstance(hands.agent.llm, Script)
    hands.agent.llm.answers = list(answers)


async def has_waited(desk: Bench, run_id: str, seconds: int) -> None:
    """Let the run's wait have begun so much earlier."""
    key, execute = desk.opened.keys.run(run_id), desk.opened.connection.execute
    wait, ms = await wait_of(desk, run_id), seconds * 1000
    began = int(await execute("HGET", key, "execution_started"))
    wait["since"] -= ms
    wait["outage"]["since"] -= ms
    stored = orjson.dumps(wait).decode()
    await execute("HSET", key, "wait", stored, "execution_started", began - ms)


async def test_a_step_waits_without_an_attempt_until_a_probe_is_answered(redis_url: str) -> None:
    async with fleet_of(redis_url, out(), time_limit=60) as (desk, hands):
        runs = [await desk.create() for _ in range(5)]
        for run_id in runs:
            await hands.step(run_id, 0)
        assert len(requests(hands)) == 1  # the others met the open circuit
        header = await desk.header(runs[1])
        assert (header["attempt"], header["limited"], header["token"]) == ("0", "0", "")
        early = await desk.refused(runs[1])
        assert (early.why, int(early.detail) > 1_500_000) == (Refused.EARLY, True)
        for run_id in runs:
            await has_waited(desk, run_id, 3600)

        await hands.breaker.look()  # wakes three
        outages = {one: (await wait_of(desk, one))["outage"] for one in runs}
        probes = [one for one, outage in outages.items() if outage.get("probes")]
        assert len(probes) == 3
        await hands.step(probes[0], 0)
        assert len(requests(hands)) == 2
        assert not (await wait_of(desk, probes[0]))["outage"].get("probes")

        answers_now(hands, say("done"))
        await hands.step(probes[1], 0)
        for run_id in runs:
            await hands.finish(run_id)
        results = [(await desk.stored(run_id)).result() for run_id in runs]
    assert {one.status for one in results} == {RunStatus.COMPLETED}
    assert all(one.duration_seconds is not None and one.duration_seconds < 60 for one in results)


async def test_a_step_gives_up_when_its_patience_is_over(redis_url: str) -> None:
    async with fleet_of(redis_url, out()) as (desk, hands):
        hands.outage_patience = 7200
        run_id = await desk.create()
        await hands.step(run_id, 0)
        await has_waited(desk, run_id, 7300)
        assert await desk.opened.circuits.wake(OF) == 1
        await hands.step(run_id, 0)
        result = (await desk.stored(run_id)).result()
    assert result.status is RunStatus.ERROR
    assert "waited 7300 s for a model that is out" in str(result.error)


async def test_two_workers_open_at_once_and_one_that_dies_in_its_probe_holds_nothing_up(
    redis_url: str,
) -> None:
    async with fleet_of(redis_url, out()) as (desk, first):
        second = worker(desk, first.agent)
        runs = [await desk.create() for _ in range(2)]
        await first.step(runs[0], 0)
        await second.step(runs[1], 0)
        store = desk.opened.circuits
        [outage] = await store.outages()
        assert (outage.service, outage.waiting) == (SERVICE, 2)

        await second.breaker.look()
        second.crash_at = "during-call"
        with pytest.raises(Crash):
            await second.step(runs[1], 0)
        await lease_runs_out(desk, runs[1])
        answers_now(first, say("done"))
        await first.step(runs[1], 0)  # still a probe
        await first.finish(runs[0])
        assert [(await desk.stored(one)).state.status.is_terminal for one in runs] == [True, True]
        assert await store.outages() == []


async def test_a_store_that_forgets_its_circuits_leaves_no_run_behind(redis_url: str) -> None:
    async with fleet_of(redis_url, out()) as (desk, hands):
        run_id = await desk.create()
        await hands.step(run_id, 0)
        await desk.opened.connection.execute("DEL", desk.opened.keys.of("sf:circuits"))
        answers_now(hands, say("done"))
        await hands.breaker.look()
        await hands.breaker.look()
        await hands.finish(run_id)
        assert (await desk.stored(run_id)).result().status is RunStatus.COMPLETED


async def test_a_worker_that_dies_between_closing_and_waking_leaves_no_run_behind(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet_of(redis_url, out()) as (desk, first):
        runs = [await desk.create() for _ in range(3)]
        for run_id in runs:
            await first.step(run_id, 0)
        second, died = worker(desk, first.agent), asyncio.Event()
        await second.breaker.look()  # three probes
        with monkeypatch.context() as dying:

            async def die(*_: Any, **__: Any) -> int:
                died.set()
                raise OSError("the worker is gone")

            dying.setattr(Circuits, "wake", die)
            answers_now(first, say("done"))
            await first.step(runs[0], 0)
            async with asyncio.timeout(60):
                await died.wait()
        await second.step(runs[1], 0)
        await second.breaker.look()
        for run_id in runs:
            await second.finish(run_id)
        assert {(await desk.stored(one)).result().status for one in runs} == {RunStatus.COMPLETED}


async def test_a_run_that_was_cancelled_in_its_wait_begins_it_anew_when_it_is_retried(
    redis_url: str,
) -> None:
    async with fleet_of(redis_url, out()) as (desk, hands):
        hands.outage_patience = 7200
        run_id = await desk.create()
        await hands.step(run_id, 0)
        await has_waited(desk, run_id, 7300)
        await desk.control.cancel(await desk.stored(run_id), "enough")
        stored = await desk.stored(run_id)
        revision = revise(stored.state, stored.log, stored.overrides, stored.state.info.updated_at)
        await desk.control.retry(stored, revision)
        await hands.step(run_id, 0)
        assert not (await desk.stored(run_id)).state.status.is_terminal
        answers_now(hands, say("done"))
        await hands.breaker.answered(SERVICE)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.status is RunStatus.COMPLETED
    assert result.duration_seconds is not None
    assert 0 <= result.duration_seconds < 60


async def test_the_end_of_a_circuit_ends_no_wait_for_a_tool(redis_url: str) -> None:
    """A run may lie in a circuit's set still when its model has answered: it was resumed."""

    @tool(queue="heavy")
    async def render() -> str:
        return "picture"

    async with fleet_of(redis_url, out(), tools=[render]) as (desk, hands):
        run_id = await desk.create()
        await hands.step(run_id, 0)
        await desk.control.pause(run_id)
        await desk.control.resume(await desk.stored(run_id))
        answers_now(hands, call(("render", {})), say("done"))
        hands.breaker = worker(desk, hands.agent).breaker  # one that has not read the circuit
        await hands.step(run_id, 0)
        before = await wait_of(desk, run_id)
        assert await desk.opened.circuits.wake(OF) == 0
        assert await wait_of(desk, run_id) == before != {}
        await hands.call(run_id, 0, 0)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert [one.result for one in result.steps[0].tool_calls] == ["picture"]


async def test_one_request_that_a_service_fails_on_opens_nothing(redis_url: str) -> None:
    failure = ModelError("boom", retryable=True, code=ModelErrorCode.SERVER_ERROR)
    async with fleet_of(redis_url, failure, model_attempts=2) as (desk, hands):
        run_id = await desk.create()
        for _ in range(2):
            await hands.step(run_id, 0)
            await let_pass(desk, run_id)
        assert (await desk.stored(run_id)).result().status is RunStatus.ERROR
        assert not await desk.opened.circuits.read()


async def test_a_paused_run_of_a_service_that_is_out_goes_on_without_its_wait(
    redis_url: str,
) -> None:
    async with fleet_of(redis_url, out(), time_limit=60) as (desk, hands):
        run_id = await desk.create()
        await hands.step(run_id, 0)
        await has_waited(desk, run_id, 3600)
        await desk.control.pause(run_id)
        await desk.control.resume(await desk.stored(run_id))
        answers_now(hands, say("done"))
        await hands.breaker.answered(SERVICE)
        await hands.finish(run_id)
        assert (await desk.stored(run_id)).result().status is RunStatus.COMPLETED


async def test_an_answer_does_not_wait_for_the_runs_that_its_circuit_wakes(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = asyncio.Event()

    async def slow(*_: Any, **__: Any) -> int:
        await go_on.wait()
        return 0

    async with fleet_of(redis_url, out()) as (_, hands):
        await hands.breaker.failed(SERVICE, "r", out())
        monkeypatch.setattr(Circuits, "wake", slow)
        async with asyncio.timeout(60):
            await hands.breaker.answered(SERVICE)
        assert not go_on.is_set(), "its runs are still being woken"
        go_on.set()


async def test_services_that_fail_at_once_are_written_once_each(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = Circuits.open

    async def counted(store: Circuits, name: str, reason: str) -> None:
        written.append(name)
        await write(store, name, reason)

    async with fleet_of(redis_url, out()) as (_, hands):
        monkeypatch.setattr(Circuits, "open", counted)
        names = [f"service {number}" for number in range(30)]
        await asyncio.gather(*(hands.breaker.failed(name, "r", out()) for name in names))
    assert sorted(written) == sorted(names)
