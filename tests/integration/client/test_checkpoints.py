"""Checkpoints of stored runs, and the runs that come of them, against a real Redis."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from uuid import uuid4

import pytest
from support.deadlines import until
from support.runs.opened_runs import opened_run
from support.runs.packed_records import hidden
from support.runs.scripted_steps import Hands, Script, call, say
from support.runs.stored_runs import Bench, answered, bench, called, failed, plain_agent
from support.runs.tools import look
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator import (
    Agent,
    AgentCheckpoint,
    AsyncFleet,
    CheckpointFolder,
    ConfigurationError,
    Lifecycle,
    LLMResponse,
    MemoryPolicy,
    ModelSettings,
    load_checkpoint,
    save_checkpoint,
    tool,
)
from stepfleet.orchestrator.errors import SerializationError

AGENT = plain_agent(max_steps=3, settings=ModelSettings(temperature=0.5))
Servers = Callable[..., RedisServer]


LOOK = call(("look", {"what": "a"}), ("look", {"what": "b"}), text="looking")


@pytest.fixture
async def desk(redis_url: str) -> AsyncIterator[Bench]:
    async with bench(redis_url, AGENT) as opened:
        await opened.opened.configs.announce(AGENT.config)
        yield opened


@pytest.fixture
async def other(own_redis: Servers) -> AsyncIterator[tuple[AsyncFleet, Bench]]:
    """Another fleet on another Redis, whose workers know the same agent."""
    url = own_redis().url
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(bench(url, AGENT))
        await opened.opened.configs.announce(AGENT.config)
        yield await stack.enter_async_context(AsyncFleet(url)), opened


async def standing(state: str, fleet: AsyncFleet, desk: Bench) -> str:
    """Return a run that stands like that."""
    run_id = await desk.create(metadata={"ticket": 7}, parent=str(uuid4()))
    if state == "queued":
        return run_id
    for step in range(3 if state == "stopped" else 1):
        claim = await desk.claim(run_id, step)
        await desk.commit(claim, failed(claim) if state == "failed" else called(claim))
    if state == "completed":
        claim = await desk.claim(run_id, 1)
        await desk.commit(claim, answered(claim))
        await fleet.runs.send(run_id, "and now?")
        claim = await desk.claim(run_id, 2)
        await desk.commit(claim, answered(claim, "this"))
    if state == "paused":
        await fleet.runs.pause(run_id)
    if state == "cancelled":
        await fleet.runs.cancel(run_id)
    if state == "held":
        await desk.claim(run_id, 1)
    return run_id


def untimed(checkpoint: AgentCheckpoint) -> dict[str, object]:
    """Return a checkpoint without the time at which it was made."""
    return {name: value for name, value in checkpoint.to_dict().items() if name != "timestamp"}


STATES = [
    *("queued", "in_progress", "held", "paused"),
    *("completed", "failed", "stopped", "cancelled"),
]


@pytest.mark.parametrize("state", STATES)
async def test_a_restored_run_is_the_same_again_on_another_redis(
    fleet: AsyncFleet, desk: Bench, other: tuple[AsyncFleet, Bench], tmp_path: Path, state: str
) -> None:
    """CKPT-03, CKPT-04, CKPT-13: through a file; its own checkpoint differs in the time only."""
    run_id = await standing(state, fleet, desk)
    kept = await fleet.history.checkpoint(run_id)
    read = load_checkpoint(save_checkpoint(kept, tmp_path / "kept.json"))
    assert read == kept
    there, _ = other

    assert await there.history.restore(read) == run_id
    assert await there.history.restore(read) == run_id

    assert untimed(await there.history.checkpoint(run_id)) == untimed(kept)
    before, after = await fleet.runs.result(run_id), await there.runs.result(run_id)
    active = {} if before.lifecycle.is_terminal else {"start_time": after.start_time}
    assert after.model_copy(update={"batch_id": before.batch_id}) == before.model_copy(
        update={"lifecycle": after.lifecycle, **active}
    )
    assert (await there.runs.show(run_id)).state.messages == (
        await fleet.runs.show(run_id)
    ).state.messages


@pytest.mark.parametrize("state", STATES)
async def test_a_restored_run_is_due_exactly_when_it_has_work(
    fleet: AsyncFleet, desk: Bench, other: tuple[AsyncFleet, Bench], state: str
) -> None:
    """CKPT-15: also what has ended expires there, and nothing else does."""
    run_id = await standing(state, fleet, desk)
    there, far = other
    await there.history.restore(await fleet.history.checkpoint(run_id))
    at_work = state in ("queued", "in_progress", "held")
    assert (await far.due(run_id) is not None) == at_work
    assert await far.queued() == (1 if at_work else 0)
    expires = await far.opened.connection.execute("TTL", far.opened.keys.run(run_id))
    assert (expires > 0) == (state in ("completed", "failed", "stopped", "cancelled"))
    if state == "paused":
        await there.runs.resume(run_id)
    if state in ("failed", "stopped", "cancelled"):
        assert (await there.runs.retry(run_id, max_steps=9)).outcome == "retried"
    if state == "completed":
        await there.runs.send(run_id, "more")
    step = (await there.runs.show(run_id)).step
    claim = await far.claim(run_id, step)
    assert (await far.commit(claim, answered(claim, "done there"))).applied
    assert (await there.runs.result(run_id)).output == "done there"


async def test_every_field_of_a_checkpoint_is_written(fleet: AsyncFleet, desk: Bench) -> None:
    """CKPT-01"""
    run_id = await standing("stopped", fleet, desk)
    data = (await fleet.history.checkpoint(run_id)).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["version"] == "1.0"
    assert data["config"]["max_steps"] == 3
    assert data["config"]["tools"] == []
    assert [one["role"] for one in data["conversation_history"]] == [
        *("system", "user"),
        *("assistant", "tool") * 3,
    ]
    assert data["state"]["step_count"] == 3
    assert [one["tool_name"] for one in data["tool_traces"]] == ["look"] * 3
    assert (data["last_result"], data["last_error"], data["last_output"]) == (2, None, "looking")
    assert [one["cost"] for one in data["cost_calls"]] == [0.25] * 3
    assert data["cost_statistics"]["total_tokens"] == 45
    assert data["metadata"] == {"ticket": 7}
    assert data["timestamp"].startswith("20")


async def test_what_the_run_does_later_is_not_in_the_checkpoint(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """CKPT-02"""
    run_id = await standing("in_progress", fleet, desk)
    kept = await fleet.history.checkpoint(run_id)
    before = kept.to_json()
    claim = await desk.claim(run_id, 1)
    await desk.commit(claim, answered(claim))
    assert kept.to_json() == before
    assert len(kept.steps) == 1
    run = await fleet.runs.show(run_id)
    run.state.metadata["ticket"] = 8
    assert kept.metadata == {"ticket": 7}


async def test_an_earlier_checkpoint_is_made_from_the_log(fleet: AsyncFleet, desk: Bench) -> None:
    run_id = await standing("in_progress", fleet, desk)
    then = await fleet.history.checkpoint(run_id)
    for step in (1, 2):
        claim = await desk.claim(run_id, step)
        await desk.commit(claim, called(claim))
    assert (await fleet.runs.result(run_id)).lifecycle is Lifecycle.STOPPED
    earlier = await fleet.history.checkpoint(run_id, at=1)
    # The step's own stamp is the worker's estimate of the time at which Redis wrote it.
    stamped = earlier.state.info.model_copy(update={"updated_at": then.state.info.updated_at})
    state = earlier.state.model_copy(update={"info": stamped})
    assert untimed(earlier.model_copy(update={"state": state})) == untimed(then)
    with pytest.raises(ConfigurationError, match=r"field 'at' is 4; run .* has 3 steps"):
        await fleet.history.checkpoint(run_id, at=4)


async def test_a_checkpoint_behind_a_step_is_the_same_before_the_next_one_and_after(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """CKPT-05: whenever it is made, and however long the commit took."""
    run_id = await desk.create()
    claim = await desk.claim(run_id, 0)

    async def some_time_passed() -> bool:
        return (await desk.runs.now() - claim.now).total_seconds() > 0.02

    await until(some_time_passed)
    await desk.commit(claim, called(claim))
    before = await fleet.history.checkpoint(run_id, at=1)
    claim = await desk.claim(run_id, 1)
    await desk.commit(claim, called(claim))
    assert untimed(await fleet.history.checkpoint(run_id, at=1)) == untimed(before)


async def test_every_second_step_has_its_checkpoint(fleet: AsyncFleet, desk: Bench) -> None:
    """CKPT-05: made while the run goes on; nothing more is written for them."""
    six = plain_agent(max_steps=6)
    digest = await desk.opened.configs.save(six.config)
    desk.agent = six
    run_id = await desk.create()
    assert (await desk.header(run_id))["config"] == digest

    async def follow() -> list[AgentCheckpoint]:
        return [one async for one in fleet.history.checkpoints(run_id, every=2, follow=True)]

    following = asyncio.create_task(follow())
    for step in range(6):
        claim = await desk.claim(run_id, step)
        await desk.commit(claim, called(claim))
    made = await following
    assert [len(one.steps) for one in made] == [2, 4, 6]
    assert [one.full_state.step_count for one in made] == [2, 4, 6]
    again = [one async for one in fleet.history.checkpoints(run_id, every=2)]
    assert [untimed(one) for one in again[:2]] == [untimed(one) for one in made[:2]]
    with pytest.raises(ConfigurationError, match="field 'every' is 0"):
        await anext(fleet.history.checkpoints(run_id, every=0))


async def test_a_failed_run_goes_on_from_its_last_good_checkpoint(
    fleet: AsyncFleet, desk: Bench, tmp_path: Path
) -> None:
    """CKPT-06, CKPT-15: the folder keeps the newest ones only."""
    desk.agent = plain_agent(max_steps=9)
    run_id = await desk.create()
    folder = CheckpointFolder(tmp_path / "kept", keep=2)
    for step in range(4):
        claim = await desk.claim(run_id, step)
        await desk.commit(claim, called(claim))
        folder.save(await fleet.history.checkpoint(run_id))
    claim = await desk.claim(run_id, 4)
    await desk.commit(claim, failed(claim))
    assert (await fleet.runs.result(run_id)).lifecycle is Lifecycle.FAILED
    assert [path.name[-11:] for path in folder.files(run_id)] == ["000003.json", "000004.json"]

    copy = await fleet.history.restore(folder.newest(run_id), run_id=str(uuid4()))

    claim = await desk.claim(copy, 4)
    assert claim.state.failures.total_failures == 0
    await desk.commit(claim, answered(claim, "after all"))
    result = await fleet.runs.result(copy)
    assert (result.output, result.steps_used) == ("after all", 5)
    assert result.origin is not None
    assert (result.origin.run_id, result.origin.at) == (run_id, 4)


async def test_restoring_twice_gives_equal_runs(fleet: AsyncFleet, desk: Bench) -> None:
    """CKPT-13: nothing is priced or pruned anew."""
    run_id = await standing("stopped", fleet, desk)
    kept = await fleet.history.checkpoint(run_id)
    copies = [await fleet.history.restore(kept, run_id=str(uuid4())) for _ in range(2)]
    (one, two) = [await fleet.history.checkpoint(copy) for copy in copies]
    assert one.cost_calls == two.cost_calls == kept.cost_calls
    assert one.conversation_history == two.conversation_history == kept.conversation_history
    assert one.steps == two.steps == kept.steps
    named = json.loads(json.dumps(untimed(one)).replace(copies[0], copies[1]))
    assert named == untimed(two)


async def test_a_narrower_memory_and_another_price_leave_what_is_restored_as_it_was(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """CKPT-13: the policy that is given holds for requests to come, the prices too."""
    run_id = await standing("stopped", fleet, desk)
    kept = await fleet.history.checkpoint(run_id)
    given = Agent(
        "plain",
        model="openai:gpt-4o",
        instructions="Be brief.",
        max_steps=3,
        memory=MemoryPolicy(max_messages=1),
    )
    copy = await fleet.history.checkpoint(
        await fleet.history.restore(kept, given, run_id=str(uuid4()))
    )
    assert copy.config.memory.max_messages == 1
    assert copy.conversation_history == kept.conversation_history
    told = [(one.input_tokens, one.output_tokens, one.cost) for one in copy.cost_calls]
    assert told == [(10, 5, 0.25)] * 3
    assert copy.cost_statistics.total_cost == kept.cost_statistics.total_cost == 0.75
    assert (await fleet.runs.result(copy.run_id)).cost_usd == (
        await fleet.runs.result(run_id)
    ).cost_usd


async def test_the_configuration_that_is_given_wins(fleet: AsyncFleet, desk: Bench) -> None:
    """CKPT-03"""
    run_id = await standing("in_progress", fleet, desk)
    kept = await fleet.history.checkpoint(run_id)
    given = Agent("plain", model="openai:better", instructions="Be long.", max_steps=8)
    copy = await fleet.history.restore(kept, given, run_id=str(uuid4()))
    claim = await desk.claim(copy, 1)
    assert claim.config == given.config
    assert claim.state.messages[0].text == "Be long."
    assert claim.state.messages[1:] == kept.conversation_history[1:]
    with pytest.raises(ConfigurationError, match=r"raise it: restore with max_steps=\d+"):
        await fleet.history.restore(kept, run_id=str(uuid4()), max_steps=1)


async def test_the_next_request_of_a_restored_run_is_the_one_that_was_to_come(
    redis_url: str, own_redis: Servers
) -> None:
    """CKPT-07: compared as a whole, with tools and settings."""
    answers = (LOOK, LOOK, say("done"))
    async with opened_run(
        redis_url, *answers, tools=(look,), settings=ModelSettings(temperature=0.1, seed=4)
    ) as (_, hands, run_id):
        async with AsyncFleet(redis_url) as fleet:
            await hands.step(run_id, 0)
            kept = await fleet.history.checkpoint(run_id)
            await hands.finish(run_id)
        asked = hands.agent.llm
        assert isinstance(asked, Script)
    url = own_redis().url
    agent = Agent("scripted", model=Script(answers), tools=[look])
    async with bench(url, agent) as far, AsyncFleet(url) as there:
        await far.opened.configs.announce(agent.config)
        await there.history.restore(AgentCheckpoint.from_json(kept.to_json()))
        await Hands(far, agent).finish(run_id)
        result = await there.runs.result(run_id)
    assert isinstance(agent.llm, Script)
    assert agent.llm.requests == asked.requests[1:]
    assert result.output == "done"
    assert result.steps_used == 3


async def test_a_checkpoint_is_read_without_agent_and_store(
    fleet: AsyncFleet, desk: Bench, tmp_path: Path
) -> None:
    """CKPT-04, CKPT-08: by another process, with its costs."""
    run_id = await standing("stopped", fleet, desk)
    path = save_checkpoint(await fleet.history.checkpoint(run_id), tmp_path / "kept.json")
    program = (
        "import sys; from stepfleet.orchestrator import load_checkpoint\n"
        "kept = load_checkpoint(sys.argv[1])\n"
        "print(kept.run_id, kept.cost_statistics.total_cost, kept.cost_statistics.total_calls)\n"
        "print([m.role.value for m in kept.conversation_history])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, check=True
    )
    said, roles = done.stdout.splitlines()
    assert said == f"{run_id} 0.75 3"
    assert roles.count("'tool'") == 3


async def test_a_state_that_was_saved_is_loaded_with_its_messages(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """CKPT-09"""
    run_id = await standing("stopped", fleet, desk)
    state = json.loads(json.dumps(await fleet.history.save_state(run_id)))
    copy = await fleet.history.load_state(state=state, run_id=str(uuid4()))
    assert (await fleet.runs.show(copy)).state.messages == (
        await fleet.runs.show(run_id)
    ).state.messages
    with pytest.raises(SerializationError, match="field 'version'"):
        await fleet.history.load_state({**state, "version": "2.0"})


async def test_neither_code_nor_credentials_nor_raw_answers_are_in_what_is_kept(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CKPT-12, SER-18: nowhere in Redis, in no snapshot, in no checkpoint."""
    markers = ["sk-canary-0451", "code-canary-0452", "raw-canary-0453", "host-canary-0454"]
    monkeypatch.setenv("CANARY_KEY", markers[0])

    @tool
    def secretive() -> str:
        """Have code."""
        return "result" if markers[1] else "code-canary-0452"

    async def answer(_: object) -> LLMResponse:
        return call(("secretive", {})).model_copy(update={"raw": {"id": markers[2]}})

    settings = ModelSettings(api_key_env="CANARY_KEY", base_url=f"http://{markers[3]}/v1")
    async with opened_run(
        redis_url, answer, say("done"), tools=(secretive,), settings=settings
    ) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        async with AsyncFleet(redis_url) as fleet:
            kept = (await fleet.history.checkpoint(run_id)).to_json() + json.dumps(
                await fleet.history.snapshot(run_id)
            )
        assert "result" in kept
        for marker in (*markers, "CANARY_KEY"):
            assert marker not in kept
        stored = await everything(desk)
    assert "secretive" in stored
    for marker in markers[:3]:
        assert marker not in stored


async def everything(desk: Bench) -> str:
    """Return all text that is in Redis."""
    execute, told = desk.opened.connection.execute, ""
    for key in await execute("KEYS", "*"):
        kind = await execute("TYPE", key)
        reading = {
            "hash": ("HGETALL", key),
            "zset": ("ZRANGE", key, 0, -1),
            "stream": ("XRANGE", key, "-", "+"),
            "list": ("LRANGE", key, 0, -1),
        }.get(kind, ("GET", key))
        found = await execute(*reading)
        told += f"{key} {found}\n{hidden(found)}\n"
    return told


async def test_a_run_of_that_id_is_not_replaced(fleet: AsyncFleet, desk: Bench) -> None:
    run_id = await standing("stopped", fleet, desk)
    kept = await fleet.history.checkpoint(run_id)
    with pytest.raises(ConfigurationError, match=r"is there already.*choose another id"):
        await fleet.history.restore(kept)
    assert untimed(await fleet.history.checkpoint(run_id)) == untimed(kept)


async def test_the_id_of_a_run_below_another_is_not_restored(
    fleet: AsyncFleet, desk: Bench
) -> None:
    kept = await fleet.history.checkpoint(await standing("stopped", fleet, desk))
    below = kept.model_copy(update={"run_id": f"{kept.run_id}.0123456789"})
    with pytest.raises(ConfigurationError, match=r"is not a UUID; choose another id"):
        await fleet.history.restore(below)
    assert await fleet.history.restore(below, run_id=str(uuid4())) != below.run_id


async def test_an_agent_that_no_worker_has_is_reported(
    fleet: AsyncFleet, desk: Bench, own_redis: Servers
) -> None:
    run_id = await standing("in_progress", fleet, desk)
    kept = await fleet.history.checkpoint(run_id)
    async with AsyncFleet(own_redis().url) as there:
        with pytest.raises(ConfigurationError, match="no agent is named 'plain'"):
            await there.history.restore(kept)
        assert await there.history.restore(kept, AGENT) == run_id


async def test_costs_add_up_over_sessions_and_checkpoints(
    fleet: AsyncFleet, desk: Bench, other: tuple[AsyncFleet, Bench]
) -> None:
    """COST-10, COST-11: asked by a client; a reset lets the statistics begin anew."""
    run_id = await standing("completed", fleet, desk)
    there, far = other
    await there.history.restore(await fleet.history.checkpoint(run_id))
    await there.runs.send(run_id, "more")
    claim = await far.claim(run_id, 3)
    await far.commit(claim, answered(claim))

    told = await there.history.get_cost_stats(run_id)
    assert (told.total_calls, told.total_tokens, told.total_cost) == (4, 60, 1.0)
    assert told.by_model["openai:none"].calls == 4
    assert "4 calls, 60 tokens, 1.000000 USD" in await there.history.get_cost_summary(run_id)
    assert (await there.runs.result(run_id)).cost_usd == 1.0

    await there.history.reset_cost_tracking(run_id)
    assert (await there.history.get_cost_stats(run_id)).total_calls == 0
    await there.runs.send(run_id, "and more")
    claim = await far.claim(run_id, 4)
    await far.commit(claim, answered(claim))
    assert (await there.history.get_cost_stats(run_id)).total_cost == 0.25
    assert (await there.runs.result(run_id)).cost_usd == 1.25
    with pytest.raises(ConfigurationError, match="no run has the id"):
        await there.history.reset_cost_tracking(str(uuid4()))


async def test_a_restore_cut_off_before_its_script_leaves_nothing(
    fleet: AsyncFleet, desk: Bench, own_redis: Servers
) -> None:
    """All or nothing: Redis refuses the write, and not one key of the run is there."""
    run_id = await standing("completed", fleet, desk)
    kept = await fleet.history.checkpoint(run_id)
    server = own_redis()
    async with bench(server.url, AGENT) as far, AsyncFleet(server.url) as there:
        await far.opened.configs.announce(AGENT.config)
        await there.submit(AGENT, "fills")
        execute = far.opened.connection.execute
        before = set(await execute("KEYS", "*"))
        await execute("CONFIG", "SET", "maxmemory", 1, "maxmemory-policy", "noeviction")
        restoring = asyncio.create_task(there.history.restore(kept))
        await until(lambda: _refused(far), within=30, what="a refusal for memory")
        assert not [key for key in await execute("KEYS", "*") if run_id in key]
        await execute("CONFIG", "SET", "maxmemory", 0)
        assert await restoring == run_id
        after = {key for key in await execute("KEYS", "*") if run_id in key}
        assert len(after - before) >= 3


async def _refused(desk: Bench) -> bool:
    errors = await desk.opened.connection.execute("INFO", "errorstats")
    return "errorstat_OOM" in str(errors)
