"""Batches into a real Redis: once, however often and however interrupted they are submitted."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs.stored_runs import Bench, answered, bench, plain_agent
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator import (
    Agent,
    AsyncFleet,
    ConfigurationError,
    Lifecycle,
    StoreError,
    tool,
)
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.batches.batches import batch_id_of, run_id_of

AGENT = plain_agent()


@pytest.fixture
def questions(tmp_path: Path) -> Callable[[int], Path]:
    def make(count: int) -> Path:
        file = tmp_path / f"questions-{count}.jsonl"
        lines = [
            json.dumps({"id": f"q{n}", "input": f"What is {n}?", "metadata": {"n": n}})
            for n in range(count)
        ]
        file.write_text("\n".join(lines) + "\n")
        return file

    return make


async def test_every_line_becomes_a_queued_run_with_one_message(
    fleet: AsyncFleet, desk: Bench, questions: Callable[[int], Path]
) -> None:
    batch = await fleet.submit_batch(questions(30), AGENT, max_steps=4)
    progress = await batch.progress()
    assert (progress.total, progress.queued, progress.open, progress.done) == (30, 30, 30, 0)
    assert progress.sealed
    assert (progress.agent, progress.format) == ("plain", "stepfleet")
    assert progress.name.endswith("questions-30.jsonl")
    assert await desk.queued() == 30
    assert (await desk.counters(batch.id))["total"] == 30
    run = await fleet.runs.show(run_id_of(batch.id, 7))
    result = run.result()
    assert (result.line_id, result.row, result.metadata) == ("q7", 7, {"n": 7})
    assert result.batch_id == batch.id
    assert result.max_iterations == 4
    assert run.state.messages[-1].text == "What is 7?"
    assert run.overrides == {"max_steps": 4}


async def test_the_same_file_submitted_twice_is_one_batch(
    fleet: AsyncFleet, desk: Bench, questions: Callable[[int], Path]
) -> None:
    first = await fleet.submit_batch(questions(30), AGENT)
    before = await desk.counters(first.id)
    again = await fleet.submit_batch(questions(30), AGENT)
    assert again.id == first.id
    assert await desk.counters(first.id) == before
    assert await desk.queued() == 30
    assert [one.batch_id for one in await fleet.batches.newest()] == [first.id]


async def test_other_lines_agents_or_overrides_are_another_batch(
    fleet: AsyncFleet, questions: Callable[[int], Path]
) -> None:
    ids = {
        (await fleet.submit_batch(questions(3), AGENT)).id,
        (await fleet.submit_batch(questions(4), AGENT)).id,
        (await fleet.submit_batch(questions(3), AGENT, max_steps=3)).id,
        (await fleet.submit_batch(questions(3), plain_agent(max_steps=2))).id,
    }
    assert len(ids) == 4
    assert len(await fleet.batches.newest()) == 4
    assert len(await fleet.batches.newest(limit=2)) == 2


async def test_an_idempotency_key_names_a_batch_and_refuses_other_content(
    fleet: AsyncFleet, questions: Callable[[int], Path]
) -> None:
    first = await fleet.submit_batch(questions(3), AGENT, idempotency_key="monday")
    second = await fleet.submit_batch(questions(3), AGENT, idempotency_key="tuesday")
    again = await fleet.submit_batch(questions(3), AGENT, idempotency_key="monday")
    assert first.id == again.id != second.id
    with pytest.raises(ConfigurationError, match=f"'monday' belongs to batch {first.id}"):
        await fleet.submit_batch(questions(4), AGENT, idempotency_key="monday")


async def test_an_interrupted_submission_is_completed_by_submitting_again(
    fleet: AsyncFleet, desk: Bench, questions: Callable[[int], Path]
) -> None:
    """Every run exists once afterwards, with exact counters."""
    file = questions(6000)
    key = "interrupted"
    batch_id = batch_id_of(f"key:{key}")

    def interrupt(submitted: int) -> None:
        task.cancel()
        assert 0 < submitted < 6000

    task = asyncio.create_task(
        fleet.submit_batch(file, AGENT, idempotency_key=key, on_progress=interrupt)
    )
    with pytest.raises(asyncio.CancelledError):
        await task
    half = await (await fleet.batches.get(batch_id)).progress()
    assert not half.sealed
    assert 0 < half.queued < 6000
    assert half.total == 6000

    told: list[int] = []
    batch = await fleet.submit_batch(file, AGENT, idempotency_key=key, on_progress=told.append)
    assert batch.id == batch_id
    assert told[-1] == 6000
    assert told == sorted(told)
    progress = await batch.progress()
    assert progress.sealed
    assert (progress.queued, progress.open) == (6000, 6000)
    assert (await desk.counters(batch.id))["total"] == 6000
    assert await desk.queued() == 6000


async def test_runs_that_ended_stay_ended_when_the_batch_is_submitted_again(
    fleet: AsyncFleet, desk: Bench, questions: Callable[[int], Path]
) -> None:
    batch = await fleet.submit_batch(questions(5), AGENT)
    claim = await desk.claim(run_id_of(batch.id, 2))
    await desk.commit(claim, answered(claim))
    again = await fleet.submit_batch(questions(5), AGENT)
    progress = await again.progress()
    assert (progress.completed, progress.queued) == (1, 4)


async def test_nothing_is_submitted_where_a_line_is_bad(
    fleet: AsyncFleet, desk: Bench, tmp_path: Path
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"input": "a"}\n{"input": 5}\n{oops\n{"input": "b", "agent": "nobody"}\n')
    with pytest.raises(ConfigurationError) as caught:
        await fleet.submit_batch(file, AGENT)
    said = caught.value.message
    assert "3 of 4 lines cannot be used, so nothing was submitted" in said
    assert "line 2: field 'input' is a number" in said
    assert "line 3: is not valid JSON" in said
    assert "line 4: no agent is named 'nobody'" in said
    assert await desk.queued() == 0
    assert await fleet.batches.newest() == []


async def test_bad_lines_are_left_out_on_request_and_told(
    fleet: AsyncFleet, desk: Bench, tmp_path: Path
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"input": "a"}\n{"input": 5}\n{"input": "b"}\n')
    batch = await fleet.submit_batch(file, AGENT, skip_invalid=True)
    assert batch.skipped_count == 1
    assert batch.skipped[0].startswith("line 2: field 'input' is a number")
    assert (await batch.progress()).total == 2
    await batch.cancel()
    assert [result.row async for result in batch.results(ordered=True)] == [0, 2]
    assert await desk.queued() == 2


async def test_objects_are_a_batch_like_a_file(fleet: AsyncFleet) -> None:
    batch = await fleet.submit_batch(({"id": str(n), "input": "x"} for n in range(3)), AGENT)
    again = await fleet.submit_batch([{"id": str(n), "input": "x"} for n in range(3)], AGENT)
    assert batch.id == again.id
    assert (await batch.progress()).total == 3


async def test_lines_may_name_agents_given_as_code_or_announced_by_workers(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """TOOL-23: names are resolved at submission."""
    writer = plain_agent(max_steps=7).config.model_copy(update={"name": "writer"})
    await desk.opened.configs.announce(writer)
    lines = [{"input": "a"}, {"input": "b", "agent": "writer"}]
    batch = await fleet.submit_batch(lines, agents={"plain": AGENT})
    agents = [(await fleet.runs.show(run_id_of(batch.id, row))).agent for row in (0, 1)]
    assert agents == ["plain", "writer"]
    assert (await fleet.runs.result(run_id_of(batch.id, 1))).max_iterations == 7


async def test_openai_requests_become_runs_of_a_plain_agent(
    fleet: AsyncFleet, tmp_path: Path
) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    body = {"model": "gpt-4o-mini", "messages": messages}
    line = {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps(line))
    batch = await fleet.submit_batch(file)
    assert (await batch.progress()).format == "openai"
    run = await fleet.runs.show(run_id_of(batch.id, 0))
    assert run.config.model == "openai:gpt-4o-mini"
    assert [message.role for message in run.state.messages] == ["system", "user"]
    assert run.result().line_id == "r1"


async def test_an_agent_or_tool_that_no_running_worker_has_is_refused_at_submission(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """TOOL-23"""

    @tool
    def look() -> str:
        """Look."""
        return "seen"

    await announce_worker(desk, "plain")
    with pytest.raises(ConfigurationError, match="no running worker has agent 'other'"):
        await fleet.submit(Agent("other", model="openai:none"), "x")
    with pytest.raises(ConfigurationError, match=r"agent 'plain' .* has no tool 'look'"):
        await fleet.submit_batch(
            [{"input": "x"}], Agent("plain", model="openai:none", tools=[look])
        )
    assert await desk.queued() == 0
    assert await fleet.submit(AGENT, "x")


async def announce_worker(desk: Bench, name: str) -> None:
    await desk.opened.configs.announce(AGENT.config)
    seen = json.dumps({"seen": time.time(), "held": 0, "slots": 1, "agents": [name]})
    await desk.opened.connection.execute("HSET", "sf:workers", "elsewhere:1", seen)


async def test_a_full_redis_stops_the_submission_with_the_fix_and_it_can_go_on(
    own_redis: Callable[..., RedisServer], questions: Callable[[int], Path]
) -> None:
    server = own_redis(maxmemory="4mb")
    file = questions(5000)
    settings = load_settings(redis_url=server.url, patience=0.5)
    async with AsyncFleet(settings=settings) as fleet, bench(server.url) as desk:
        with pytest.raises(StoreError, match="raise its maxmemory"):
            await fleet.submit_batch(file, AGENT)
        await desk.opened.connection.execute("CONFIG", "SET", "maxmemory", "0")
        batch = await fleet.submit_batch(file, AGENT)
        progress = await batch.progress()
        assert (progress.queued, progress.sealed) == (5000, True)
        assert (await desk.counters(batch.id))["total"] == 5000


async def test_a_submission_goes_on_after_redis_was_restarted(
    own_redis: Callable[..., RedisServer], questions: Callable[[int], Path]
) -> None:
    """DIST-12: created once, also where the reply was lost."""
    server = own_redis(appendfsync="always")
    restarts: list[int] = []

    def restart(submitted: int) -> None:
        if not restarts:
            restarts.append(submitted)
            server.kill()
            server.start()

    async with AsyncFleet(server.url) as fleet, bench(server.url) as desk:
        batch = await fleet.submit_batch(questions(4000), AGENT, on_progress=restart)
        assert restarts
        assert (await batch.progress()).queued == 4000
        assert (await desk.counters(batch.id))["total"] == 4000
        assert await desk.queued() == 4000


async def test_with_another_broker_first_messages_are_published_by_celery(
    redis_url: str, questions: Callable[[int], Path]
) -> None:
    settings = load_settings(redis_url=redis_url, broker_url=redis_url.replace("/0", "/1"))
    async with AsyncFleet(settings=settings) as fleet:
        batch = await fleet.submit_batch(questions(7), AGENT)
        assert (await batch.progress()).queued == 7
        assert (await fleet.overview()).queue_length == 7
        again = await fleet.submit_batch(questions(7), AGENT)
        assert again.id == batch.id
        assert (await fleet.overview()).queue_length == 7


async def test_ended_runs_and_counters_expire_and_active_ones_never_do(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """DIST-13"""
    batch = await fleet.submit_batch([{"input": str(n)} for n in range(40)], AGENT)
    connection, keys = desk.opened.connection, desk.opened.keys
    ended, active = run_id_of(batch.id, 0), run_id_of(batch.id, 1)
    claim = await desk.claim(ended)
    await desk.commit(claim, answered(claim))
    retention = desk.opened.settings.retention
    await desk.keep_up()
    parts = (keys.run(ended), f"{keys.run(ended)}:log", f"{keys.run(ended)}:events")
    for key in (*parts, keys.run(active), keys.manifest(batch.id)):
        assert await connection.execute("TTL", key) == -1
    await batch.cancel()
    await desk.keep_up()
    for key in parts:
        assert 0 < await connection.execute("TTL", key) <= retention
    used = {keys.shard_of(run_id_of(batch.id, row)) for row in range(40)}
    for shard in used:
        assert 0 < await connection.execute("TTL", keys.batch(shard, batch.id)) <= retention
        assert 0 < await connection.execute("TTL", keys.ended(shard, batch.id)) <= retention


async def test_counters_that_were_to_expire_live_on_with_the_next_run_of_the_batch(
    desk: Bench,
) -> None:
    """DIST-13: a batch whose first runs end while others are still submitted."""
    first = await desk.create(batch="b9")
    shard = desk.opened.keys.shard_of(first)
    claim = await desk.claim(first)
    await desk.commit(claim, answered(claim))
    key = desk.opened.keys.batch(shard, "b9")
    await desk.keep_up()
    assert await desk.opened.connection.execute("TTL", key) > 0
    while desk.opened.keys.shard_of(await desk.create(batch="b9")) != shard:
        pass
    assert await desk.opened.connection.execute("TTL", key) == -1
    await desk.keep_up()
    ended = desk.opened.keys.ended(shard, "b9")
    assert await desk.opened.connection.execute("TTL", ended) == -1


async def test_a_delayed_run_is_due_later_and_has_no_message_yet(
    fleet: AsyncFleet, desk: Bench
) -> None:
    before = (await desk.runs.now()).timestamp()
    run_id = await fleet.submit(AGENT, "later", delay=600)
    after = (await desk.runs.now()).timestamp()
    assert await desk.queued() == 0
    assert (await fleet.runs.result(run_id)).lifecycle is Lifecycle.QUEUED
    due = await desk.due(run_id)
    assert due is not None
    assert before + 599 < due / 1000 < after + 601


async def active_runs(desk: Bench) -> list[str]:
    """Return the runs that have not ended, of all shards."""
    keys = desk.opened.keys
    pages = (("ZRANGE", keys.due(shard), 0, -1) for shard in range(keys.shards))
    found = await desk.opened.connection.execute_all(*pages)
    return [run_id for page in found for run_id in page]


async def test_a_flood_waits_for_room_and_is_whole_in_the_end(
    redis_url: str, questions: Callable[[int], Path]
) -> None:
    """DIST-15: never more runs are active than the fleet may have; single runs are refused."""
    limited = load_settings(redis_url=redis_url, max_active_runs=20)
    most = refused = 0
    async with AsyncFleet(settings=limited) as fleet, bench(redis_url) as desk:
        submitting = asyncio.create_task(fleet.submit_batch(questions(70), AGENT))
        while (active := await active_runs(desk)) or not submitting.done():
            most = max(most, len(active))
            if len(active) == 20:
                with pytest.raises(StoreError, match="max_active_runs is 20"):
                    await fleet.submit(AGENT, "one more")
                refused += 1
            if len(active) == 20 or submitting.done():
                for run_id in active[:15]:
                    await fleet.runs.cancel(run_id)
        progress = await (await submitting).progress()
    assert most == 20
    assert refused >= 3
    assert (progress.total, progress.cancelled, progress.open) == (70, 70, 0)
