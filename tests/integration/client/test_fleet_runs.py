"""Single runs through the client: submitted, followed, read by anyone; plain and asynchronous."""

import asyncio
import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from support.deadlines import until, wait_until
from support.runs.stored_runs import Bench, answered, bench, called, failed, plain_agent

from stepfleet.orchestrator import (
    AgentRunResult,
    AsyncFleet,
    ConfigurationError,
    ConflictError,
    Fleet,
    Lifecycle,
    MaxStepsExceeded,
    Message,
    NotFoundError,
    RunFailed,
    RunStatus,
)
from stepfleet.orchestrator.store.batches.batches import run_id_of

AGENT = plain_agent()


BENCH: dict[str, Any] = {"agent": AGENT}


async def next_run(desk: Bench) -> str:
    """Return the id of the only run that is due."""

    async def found() -> str | None:
        for shard in range(desk.opened.keys.shards):
            due = await desk.opened.connection.execute("ZRANGE", desk.opened.keys.due(shard), 0, 0)
            if due:
                return str(due[0])
        return None

    run_id = await until(found, within=60)
    assert run_id is not None
    return run_id


async def answer_next(desk: Bench, text: str = "fine") -> str:
    run_id = await next_run(desk)
    claim = await desk.claim(run_id)
    await desk.commit(claim, answered(claim, text=text))
    return run_id


async def test_a_prompt_a_conversation_and_a_run_with_steps_are_the_same_run(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """RUN-31"""
    work = asyncio.create_task(fleet.run(AGENT, "hi", timeout=60))
    await answer_next(desk, "hello")
    assert await work == "hello"
    talk = asyncio.create_task(
        fleet.run_with_messages(AGENT, [Message.user("hi"), Message.assistant("?")], timeout=60)
    )
    await answer_next(desk, "hello again")
    assert await talk == "hello again"
    whole = asyncio.create_task(fleet.run_with_steps(AGENT, "hi", timeout=60))
    run_id = await answer_next(desk, "hello")
    result = await whole
    assert (result.run_id, result.steps_used, result.status) == (run_id, 1, RunStatus.COMPLETED)


async def test_a_run_that_fails_raises_only_where_text_is_asked_for(
    fleet: AsyncFleet, desk: Bench
) -> None:
    async def fail_next() -> None:
        claim = await desk.claim(await next_run(desk))
        await desk.commit(claim, failed(claim))

    work = asyncio.create_task(fleet.run(AGENT, "hi"))
    await fail_next()
    with pytest.raises(RunFailed, match="no answer") as caught:
        await work
    assert isinstance(caught.value.result, AgentRunResult)
    whole = asyncio.create_task(fleet.run_with_steps(AGENT, "hi"))
    await fail_next()
    assert (await whole).status is RunStatus.ERROR


async def test_a_run_that_a_limit_stops_raises_where_text_is_asked_for(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """RUN-31: its last text is no answer."""

    async def call_tools() -> None:
        claim = await desk.claim(await next_run(desk))
        await desk.commit(claim, called(claim))

    work = asyncio.create_task(fleet.run(AGENT, "hi", max_steps=1, timeout=60))
    await call_tools()
    with pytest.raises(MaxStepsExceeded, match="steps: 1 has reached the limit of 1") as caught:
        await work
    assert isinstance(caught.value.result, AgentRunResult)


async def test_a_run_that_never_raises_gives_its_result(fleet: AsyncFleet, desk: Bench) -> None:
    """RUN-31"""
    for ask in (
        fleet.run(AGENT, "hi", timeout=60, raise_on="never"),
        fleet.run_with_messages(AGENT, [Message.user("hi")], timeout=60, raise_on="never"),
    ):
        work = asyncio.create_task(ask)
        claim = await desk.claim(await next_run(desk))
        await desk.commit(claim, failed(claim))
        result = await work
        assert (result.status, result.steps_used) == (RunStatus.ERROR, 1)


async def test_an_unknown_word_for_when_to_raise_is_refused_before_anything_is_paid(
    fleet: AsyncFleet, desk: Bench
) -> None:
    with pytest.raises(ConfigurationError, match="field 'raise_on' is 'error'; write 'not_com"):
        await fleet.run(AGENT, "hi", raise_on="error")  # type: ignore[call-overload]
    assert await desk.queued() == 0


async def test_a_run_goes_on_when_waiting_for_it_ends(fleet: AsyncFleet, desk: Bench) -> None:
    run_id = await fleet.submit(AGENT, "hi")
    with pytest.raises(TimeoutError):
        await fleet.runs.wait(run_id, timeout=0.1)
    await answer_next(desk)
    assert (await fleet.runs.wait(run_id, timeout=60)).output == "fine"


async def test_a_run_id_or_key_of_another_input_is_refused_and_the_same_one_is_not(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """RUN-01"""
    first = ""
    names: list[dict[str, Any]] = [{"run_id": str(uuid4())}, {"idempotency_key": "order-77"}]
    others: list[tuple[str, dict[str, Any]]] = [("goodbye", {}), ("hello", {"max_steps": 3})]
    for name in names:
        first = await fleet.submit(AGENT, "hello", **name)
        for metadata in ({"at": 1}, {"at": 2}):  # of no account to the answer
            assert await fleet.submit(AGENT, "hello", metadata=metadata, **name) == first
        for given, options in others:
            with pytest.raises(ConflictError, match=f"{first} is there already.*another") as said:
                await fleet.submit(AGENT, given, **options, **name)
            assert said.value.code == "CONFLICT"
        assert (await desk.stored(first)).log == ()
    assert await fleet.submit(AGENT, "hello", idempotency_key="order-78") != first
    claim = await desk.claim(first)
    await desk.commit(claim, answered(claim))
    assert await fleet.submit(AGENT, "hello", idempotency_key="order-77") == first


async def test_the_id_of_a_batchs_run_is_no_single_runs(fleet: AsyncFleet) -> None:
    batch = await fleet.submit_batch([{"input": "hello"}], AGENT)
    with pytest.raises(ConflictError):
        await fleet.submit(AGENT, "hello", run_id=run_id_of(batch.id, 0))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"run_id": "order-77"}, r"not a UUID; pass idempotency_key=.*uuid\.uuid5"),
        ({"run_id": str(uuid4()), "idempotency_key": "a"}, "give one of them"),
        ({"idempotency_key": " "}, "idempotency_key is ' '; write text"),
        ({"idempotency_key": 77}, "idempotency_key is 77; write text"),
    ],
)
async def test_what_names_no_run_is_refused_with_the_fix(
    fleet: AsyncFleet, options: dict[str, Any], said: str
) -> None:
    """CONF-04"""
    with pytest.raises(ConfigurationError, match=said):
        await fleet.submit(AGENT, "hello", **options)


async def test_an_unknown_run_and_one_that_has_not_ended_have_errors_of_their_own(
    fleet: AsyncFleet,
) -> None:
    """ERR-20"""
    unknown = str(uuid4())
    for look in (fleet.runs.result, fleet.runs.show, fleet.runs.cancel, fleet.runs.timeline):
        with pytest.raises(NotFoundError, match=unknown):
            await look(unknown)
    with pytest.raises(NotFoundError, match="no batch"):
        await fleet.batches.get(unknown)
    with pytest.raises(NotFoundError, match="there is no schedule"):
        await fleet.schedules.get("nightly")
    active = await fleet.submit(AGENT, "hello")
    with pytest.raises(ConflictError, match="has not ended"):
        await fleet.runs.send(active, "more")


async def test_a_run_id_of_ones_own_is_submitted_once(fleet: AsyncFleet, desk: Bench) -> None:
    run_id = "12345678-1234-5678-1234-567812345678"
    assert await fleet.submit(AGENT, "hi", run_id=run_id, metadata={"n": 1}) == run_id
    assert await fleet.submit(AGENT, "hi", run_id=run_id) == run_id
    assert (await fleet.runs.show(run_id)).state.messages[-1].text == "hi"
    assert (await fleet.runs.result(run_id)).metadata == {"n": 1}
    assert await desk.queued() == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"input": ""}, "field 'input' is empty"),
        ({"input": "x" * 1_048_577}, "the limit is 1,048,576"),
        ({"input": [{"role": "boss"}]}, "field 'input.0'"),
        ({"input": "x", "run_id": "mine"}, "run_id 'mine' is not a UUID"),
        ({"input": "x", "delay": -1}, "delay is -1"),
        ({"input": "x", "delay": float("nan")}, "delay is nan"),
        ({"input": "x", "speed": 2}, "field 'speed' is not known"),
        ({"input": "x", "max_steps": 0}, "field 'max_steps'"),
        ({"input": "x", "agent": "nobody"}, "no agent is named 'nobody'"),
    ],
)
async def test_a_wrong_submission_is_reported_and_leaves_nothing(
    fleet: AsyncFleet, desk: Bench, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        await fleet.submit(**{"agent": AGENT, **arguments})
    assert said in caught.value.message
    assert await desk.queued() == 0


async def test_events_are_followed_until_the_run_has_ended(fleet: AsyncFleet, desk: Bench) -> None:
    run_id = await fleet.submit(AGENT, "hi")
    (queued,) = [event async for event in fleet.runs.events(run_id)]
    assert (queued["type"], queued["payload"]["status"]) == ("agent.status", "queued")
    told: list[dict[str, object]] = []

    async def follow() -> None:
        async for event in fleet.runs.events(run_id, follow=True):
            told.append(event)  # noqa: PERF401 - looked at meanwhile

    following = asyncio.create_task(follow())
    claim = await desk.claim(run_id)
    await desk.commit(claim, called(claim))

    async def has_tool() -> bool:
        return any(event["type"] == "agent.tool.completed" for event in told)

    await until(has_tool, within=60)
    claim = await desk.claim(run_id, 1)
    await desk.commit(claim, answered(claim))
    await asyncio.wait_for(following, 60)
    assert [event["sequence"] for event in told] == list(range(1, len(told) + 1))
    assert told[-1]["payload"]["status"] == "completed"  # type: ignore[index]


async def test_the_overview_counts_runs_messages_and_overdue_seconds(
    fleet: AsyncFleet, desk: Bench
) -> None:
    await fleet.submit(AGENT, "hi")
    overdue = await fleet.submit(AGENT, "hi")
    await fleet.submit(AGENT, "later", delay=100)
    due = desk.opened.keys.due(desk.opened.keys.shard_of(overdue))
    now = (await desk.runs.now()).timestamp()
    await desk.opened.connection.execute("ZADD", due, round((now - 60) * 1000), overdue)
    seen = await fleet.overview()
    assert (seen.active, seen.queue_length) == (3, 2)
    assert 59 <= seen.oldest_due_seconds < 90
    assert seen.redis_version[0].isdigit()
    assert seen.workers == ()


def test_the_plain_fleet_submits_waits_and_reads(redis_url: str) -> None:
    with Fleet(redis_url) as fleet:
        worker = threading.Thread(target=_answer_in_a_thread, args=(redis_url, 3))
        worker.start()
        batch = fleet.submit_batch([{"input": "a"}, {"input": "b"}], AGENT)
        assert sorted(result.row or 0 for result in batch.results()) == [0, 1]
        assert batch.wait(timeout=60).ok
        assert fleet.run(AGENT, "hi", timeout=60) == "fine"
        worker.join()
        assert [one.batch_id for one in fleet.batches.newest()] == [batch.id]
        again = fleet.batches.get(batch.id)
        assert [result.row for result in again.results(ordered=True)] == [0, 1]
        run_id = fleet.submit(AGENT, "hi")
        assert fleet.runs.pause(run_id).outcome == "paused"
        assert fleet.runs.resume(run_id).outcome == "resumed"
        assert fleet.runs.cancel(run_id).outcome == "cancelled"
        assert fleet.runs.retry(run_id).outcome == "retried"
        assert fleet.runs.result(run_id).lifecycle is Lifecycle.IN_PROGRESS
        statuses = [event["payload"]["status"] for event in fleet.runs.events(run_id)]
        assert statuses[0] == "queued"
        with pytest.raises(ConfigurationError):
            fleet.runs.show("nothing")


def _answer_in_a_thread(url: str, count: int) -> None:
    async def answer() -> None:
        async with bench(url, AGENT) as desk:
            for _ in range(count):
                await answer_next(desk)

    asyncio.run(answer())


def test_a_batch_keeps_its_forgotten_fleet_alive(redis_url: str) -> None:
    batch = Fleet(redis_url).submit_batch([{"input": "a"}], AGENT)
    gc.collect()
    assert batch.cancel() == 1
    results = batch.results()
    del batch
    gc.collect()
    assert [result.lifecycle for result in results] == [Lifecycle.CANCELLED]


def test_a_forgotten_fleet_ends_its_thread(redis_url: str) -> None:
    before = set(threading.enumerate())
    fleet = Fleet(redis_url)
    fleet.check()
    (thread,) = set(threading.enumerate()) - before
    del fleet
    gc.collect()
    wait_until(lambda: not thread.is_alive(), within=60)


def test_a_result_is_read_by_another_process_after_its_client_was_killed(redis_url: str) -> None:
    """RUN-33"""
    program = (
        "import sys, os, signal\n"
        "from stepfleet.orchestrator import Agent, Fleet\n"
        "fleet = Fleet(sys.argv[1])\n"
        "agent = Agent('plain', model='openai:none')\n"
        "print(fleet.submit(agent, 'hi'), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    client = subprocess.run(
        [sys.executable, "-c", program, redis_url], capture_output=True, text=True, check=False
    )
    assert client.returncode == -9
    _answer_in_a_thread(redis_url, 1)
    with Fleet(redis_url) as fleet:
        assert fleet.runs.result(client.stdout.strip()).output == "fine"


def test_a_client_of_the_fleet_imports_no_worker_and_ends_without_a_word(
    redis_url: str, tmp_path: Path
) -> None:
    program = (
        "import sys\n"
        "from stepfleet.orchestrator import Agent, Fleet\n"
        "batch = Fleet(sys.argv[1]).submit_batch([{'input': 'x'}], "
        "Agent('plain', model='openai:none'))\n"
        "assert not [name for name in sys.modules if name.startswith('stepfleet.worker')]\n"
        "print(batch.progress().queued)\n"
    )
    client = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, redis_url],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=60,
    )
    assert (client.stdout, client.stderr, client.returncode) == ("1\n", "", 0)
