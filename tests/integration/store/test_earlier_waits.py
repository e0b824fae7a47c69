"""Runs that wait as the version before has stored it: read alike everywhere, and woken."""

from typing import Any

import pytest
from support.runs.stored_runs import Bench

from stepfleet.orchestrator.protocol.attempt import Wait
from stepfleet.orchestrator.protocol.claim import Outage, Refusal, Refused, Work
from stepfleet.orchestrator.protocol.verdict import circuit_id
from stepfleet.orchestrator.protocol.waiting import StepWait, WaitReason
from stepfleet.orchestrator.store.codec import load_wait, moment
from stepfleet.orchestrator.store.lua import file_texts, run_script

AT, LATER, FOR_RUNS = 1_700_000_000_000, 4_000_000_000_000, 32_503_680_000_000
OPENAI = circuit_id("openai")
CALLS = (Wait(0, "gpu", "render"), Wait(12, "@approval", "refund"))
OUTAGE = Outage(moment(AT - 5), (OPENAI, circuit_id("other")))
OUT = f"{AT - 5} waits {' '.join(OUTAGE.circuits)}"

WAITS: dict[str, tuple[dict[str, Any], StepWait | None]] = {
    "nothing": ({"not_before": 0, "waiting": ""}, None),
    "another attempt": (
        {"not_before": LATER, "updated": AT},
        StepWait(WaitReason.DELAY, moment(AT), moment(LATER)),
    ),
    "calls": (
        {"not_before": LATER, "updated": AT, "waiting": "0 0:gpu:render 12:@approval:refund"},
        StepWait(WaitReason.CALLS, moment(AT), moment(LATER), calls=CALLS),
    ),
    "calls, and a worker has taken the step": (
        {"not_before": 0, "updated": AT, "waiting": "0 0:gpu:render 12:@approval:refund"},
        StepWait(WaitReason.CALLS, moment(AT), calls=CALLS, over=True),
    ),
    "calls of an earlier step": ({"not_before": 0, "waiting": "7 0:gpu:render"}, None),
    "a service": (
        {"not_before": LATER, "parked": AT, "outage": OUT},
        StepWait(WaitReason.SERVICE, moment(AT), moment(LATER), outage=OUTAGE),
    ),
    "a service that is probed": (
        {"not_before": 0, "updated": AT, "outage": OUT.replace("waits", "probes")},
        StepWait(
            WaitReason.SERVICE,
            moment(AT),
            outage=Outage(OUTAGE.since, OUTAGE.circuits, probes=True),
            over=True,
        ),
    ),
    "a limit": (
        {"not_before": AT, "parked": AT},
        StepWait(WaitReason.LIMIT, moment(AT), moment(AT)),
    ),
    "runs before it": (
        {"not_before": FOR_RUNS, "updated": AT},
        StepWait(WaitReason.RUNS, moment(AT)),
    ),
}


async def earlier(desk: Bench, **fields: Any) -> str:
    """Create a run as a worker of the version before would have left it."""
    run_id = await desk.create()
    flat = [part for field in ({"v": 2} | fields).items() for part in field]
    await desk.opened.connection.execute("HSET", desk.opened.keys.run(run_id), *flat)
    return run_id


@pytest.mark.parametrize(("fields", "wait"), WAITS.values(), ids=WAITS)
async def test_an_earlier_wait_is_read_alike_by_clients_and_scripts(
    desk: Bench, fields: dict[str, Any], wait: StepWait | None
) -> None:
    run_id = await earlier(desk, **fields)
    assert load_wait(await desk.header(run_id)) == wait
    texts = file_texts()
    script = f"{texts['fields']}{texts['wait']} return cjson.encode(earlier_wait(KEYS[1]))"
    key = desk.opened.keys.run(run_id)
    read = await desk.opened.connection.execute("EVAL", script, 1, key)
    assert load_wait({} if read == "null" else {"wait": read}) == wait


def test_a_wait_that_only_a_newer_version_knows_can_be_listed() -> None:
    """One such run does not end the list of all that wait."""
    stored = '{"reason":"moon","since":1,"calls":[[3,"@approval","refund","by night"]],"phase":1}'
    wait = load_wait({"wait": stored, "v": "4"})
    assert wait is not None
    assert wait.reason is WaitReason.OTHER
    assert wait.calls == (Wait(3, "@approval", "refund"),)


async def test_an_earlier_wait_stays_earlier_until_it_changes(desk: Bench) -> None:
    """Who only looks at a run leaves it to workers of the version before."""
    waiting = {"status": "in_progress", "not_before": LATER, "waiting": "0 0:gpu:render"}
    run_id = await earlier(desk, **waiting)
    await desk.opened.connection.execute("ZADD", *due(desk, run_id, 1))
    assert (await rescue(desk, run_id))[1][:4] == [run_id, "0", "plain", "0"]
    assert (await desk.refused(run_id)).why is Refused.EARLY
    before = await desk.header(run_id)
    assert before["v"] == "2"
    await desk.control.pause(run_id)
    await desk.control.resume(await desk.stored(run_id))
    after = await desk.header(run_id)
    assert after["v"] == "3"
    wait = load_wait(after)
    assert wait is not None
    assert wait.calls == CALLS[:1]


async def test_the_version_before_sees_until_when_and_for_which_calls_a_run_waits(
    desk: Bench,
) -> None:
    """Its claims come too early, its lists of approvals keep the call, its cancel finds runs."""
    run_id = await earlier(desk, not_before=LATER, waiting="0 0:gpu:render 12:@approval:refund")
    await desk.opened.connection.execute("HSET", desk.opened.keys.run(run_id), "updated", 1)
    await desk.control.pause(run_id)
    await desk.control.resume(await desk.stored(run_id))
    header = await desk.header(run_id)
    assert header["waiting"] == "0 0:gpu:render 12:@approval:refund"
    assert int(header["not_before"]) > LATER


async def test_what_a_lost_worker_of_the_version_before_waited_for_is_known(desk: Bench) -> None:
    """Its calls are overdue for whoever takes the step next."""
    run_id = await earlier(desk, token="theirs", lease=1, waiting="0 0:gpu:render")
    claim = await desk.claim(run_id)
    assert claim.overdue == {0}


async def test_a_worker_of_the_version_before_that_dies_with_a_waiting_step_is_forgotten(
    desk: Bench,
) -> None:
    """Else what the run waits for would find an owner, for as long as the wait may last."""
    run_id = await earlier(desk, not_before=LATER, updated=AT, waiting="0 0:gpu:render")
    key = desk.opened.keys.run(run_id)
    await desk.opened.connection.execute("HSET", key, "token", "theirs", "lease", 1)
    assert (await desk.refused(run_id)).why is Refused.EARLY
    assert (await desk.header(run_id))["token"] == ""


async def test_a_service_that_is_back_wakes_a_run_of_the_version_before(desk: Bench) -> None:
    run_id = await earlier(desk, not_before=LATER, parked=AT, outage=OUT)
    shard = desk.opened.keys.tag(desk.opened.keys.shard_of(run_id))
    await desk.opened.connection.execute("SADD", f"{shard}out:{OPENAI}", run_id)
    assert (await desk.refused(run_id)).why is Refused.EARLY
    assert await desk.opened.circuits.wake(OPENAI) == 1
    claim = await desk.claim(run_id)
    assert claim.outage is not None
    assert claim.outage.since == OUTAGE.since


async def test_runs_that_the_version_before_put_aside_for_limits_are_looked_at(
    desk: Bench,
) -> None:
    """It gave them a time beyond all others, and looked for them itself."""
    run_id = await earlier(desk, not_before=AT, parked=AT)
    await desk.opened.connection.execute("ZADD", *due(desk, run_id, 40_000_000_000_000 + AT))
    found = await rescue(desk, run_id)
    assert found[4] == [run_id, "0", "plain"]
    at = await desk.due(run_id)
    assert at is not None
    assert at < LATER


async def test_a_result_that_a_worker_of_the_version_before_delivers_is_found(desk: Bench) -> None:
    """It does not know of the run's wait; the next look at the call does."""
    run_id = await earlier(desk)
    key, execute = desk.opened.keys.run(run_id), desk.opened.connection.execute
    wait = '{"reason":"calls","since":1,"deadline":4000000000000,"calls":[[0,"gpu","render"]]}'
    await execute("HSET", key, "status", "in_progress", "wait", wait, "v", "3")
    await execute("HSET", f"{key}:journal", "response", "{}", "r:0", "{}", "n:0", "1")
    refusal = await desk.steps.calls.take(Work(run_id, 0, 0), "mine")
    assert isinstance(refusal, Refusal)
    assert load_wait(await desk.header(run_id)) is None
    assert await desk.due(run_id) == pytest.approx(await now(desk), abs=60_000)


def due(desk: Bench, run_id: str, at: int) -> tuple[str, int, str]:
    keys = desk.opened.keys
    return keys.due(keys.shard_of(run_id)), at, run_id


async def rescue(desk: Bench, run_id: str) -> list[Any]:
    keys = desk.opened.keys
    shard = [keys.due(keys.shard_of(run_id))]
    found = await run_script(desk.opened.connection, "rescue", shard, 10, 60_000, "0")
    return list(found)


async def now(desk: Bench) -> float:
    return (await desk.runs.now()).timestamp() * 1000
