"""Forks: runs that begin with the first steps of another, against a real Redis."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from uuid import uuid4

import pytest
from redis import Redis
from support.runs.stored_runs import Bench, answered, bench, called, failed, plain_agent
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator import AsyncFleet, ConfigurationError, Lifecycle
from stepfleet.orchestrator.records.run.facts import OriginKind

AGENT = plain_agent(max_steps=6)


@pytest.fixture
async def desk(redis_url: str) -> AsyncIterator[Bench]:
    async with bench(redis_url, AGENT) as opened:
        await opened.opened.configs.announce(AGENT.config)
        yield opened


async def worked(desk: Bench, steps: int, *, answer: bool = True) -> str:
    """Return a run with `steps` steps that called tools, and its answer."""
    run_id = await desk.create()
    for step in range(steps):
        claim = await desk.claim(run_id, step)
        await desk.commit(claim, called(claim))
    if answer:
        claim = await desk.claim(run_id, steps)
        await desk.commit(claim, answered(claim))
    return run_id


async def test_a_fork_begins_with_the_first_steps_and_goes_its_own_way(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await worked(desk, 3)
    before = await fleet.runs.show(run_id)

    fork = await fleet.history.fork(run_id, at=2, model="openai:other", instructions="Be long.")

    claim = await desk.claim(fork, 2)
    assert claim.config.model == "openai:other"
    assert claim.state.messages[0].text == "Be long."
    assert claim.state.messages[1:] == before.state.messages[1:6]
    assert (claim.state.step_count, claim.state.session_steps) == (2, 2)
    assert claim.state.usage.total_tokens == 30
    assert claim.state.agent_id == claim.state.info.id == fork
    await desk.commit(claim, answered(claim, "otherwise"))
    result = await fleet.runs.result(fork)
    assert result.lifecycle is Lifecycle.COMPLETED
    assert [step.step for step in result.steps] == [1, 2, 3]
    assert result.origin is not None
    assert (result.origin.kind, result.origin.run_id) == (OriginKind.FORK, run_id)
    assert (result.origin.at, result.origin.tokens, result.origin.cost_usd) == (2, 30, 0.5)
    assert (await fleet.runs.show(run_id)).header == before.header


async def test_a_fork_of_a_run_at_work_takes_what_is_committed(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await worked(desk, 1, answer=False)
    held = await desk.claim(run_id, 1)

    fork = await fleet.history.fork(run_id)

    assert (await desk.claim(fork, 1)).state.messages == held.state.messages
    assert (await desk.commit(held, answered(held))).applied


async def test_a_fork_at_0_begins_anew_with_the_same_or_another_input(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await worked(desk, 1)
    same, other = await asyncio.gather(
        fleet.history.fork(run_id, at=0), fleet.history.fork(run_id, at=0, message="something else")
    )
    texts = [
        [message.text for message in (await desk.claim(fork)).state.messages[1:]]
        for fork in (same, other)
    ]
    assert texts == [["hello"], ["something else"]]


async def test_a_fork_behind_the_answer_needs_a_further_message(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await worked(desk, 1)
    with pytest.raises(ConfigurationError, match=r"had its answer with step 2.*at=1.*message"):
        await fleet.history.fork(run_id)

    fork = await fleet.history.fork(run_id, message="and now?")

    claim = await desk.claim(fork, 2)
    assert claim.state.messages[-1].text == "and now?"
    assert (claim.state.step_count, claim.state.session_steps) == (0, 2)
    assert claim.state.info.execution_id == f"{fork}:2"


async def test_a_message_sent_to_the_run_belongs_to_the_fork_that_begins_there(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await worked(desk, 0)
    await fleet.runs.send(run_id, "and now?")
    claim = await desk.claim(run_id, 1)
    await desk.commit(claim, answered(claim, "this"))

    fork = await fleet.history.fork(run_id, at=1)

    forked = await desk.claim(fork, 1)
    assert forked.state.messages == claim.state.messages
    assert forked.state.step_count == 0


async def test_forking_to_the_same_id_twice_makes_one_run(fleet: AsyncFleet, desk: Bench) -> None:
    run_id, fork = await worked(desk, 2), str(uuid4())
    made = await asyncio.gather(
        *(fleet.history.fork(run_id, at=1, new_run_id=fork) for _ in range(5))
    )
    assert set(made) == {fork}
    assert await desk.due(fork) is not None
    with pytest.raises(ConfigurationError, match="is there already"):
        await fleet.history.fork(run_id, at=2, new_run_id=fork)
    with pytest.raises(ConfigurationError, match="is there already"):
        await fleet.history.fork(run_id, at=1, new_run_id=run_id)


async def test_a_fork_joins_no_batch_and_the_tail_of_the_queue(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await worked(desk, 2)
    counted, waiting = await desk.counters(), await desk.queued()
    fork = await fleet.history.fork(run_id, at=1)
    assert await desk.counters() == counted
    assert (await fleet.runs.result(fork)).batch_id is None
    assert await desk.queued() == waiting + 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"at": 9}, "field 'at' is 9; run .* has 4 steps: 0 to 4"),
        ({"at": -1}, "field 'at' is -1"),
        ({"at": 1, "max_steps": 1}, r"would end at once.*raise it: fork with max_steps=2"),
        ({"at": 1, "colour": 1}, "field 'colour'"),
        ({"at": 1, "tools": ["fly"]}, "field 'tools': agent 'plain' has no tool 'fly'"),
        ({"at": 1, "new_run_id": "x"}, "is not a UUID"),
        ({"at": 1, "message": " "}, "field 'message' is empty"),
    ],
)
async def test_a_fork_that_cannot_be_made_says_why_and_makes_nothing(
    fleet: AsyncFleet, desk: Bench, options: dict[str, object], said: str
) -> None:
    run_id = await worked(desk, 3)
    there = await desk.opened.connection.execute("DBSIZE")
    with pytest.raises(ConfigurationError, match=said):
        await fleet.history.fork(run_id, **options)  # type: ignore[arg-type]
    assert await desk.opened.connection.execute("DBSIZE") == there


async def test_with_a_broker_of_its_own_the_hint_is_published(
    redis_url: str, own_redis: Callable[..., RedisServer], desk: Bench
) -> None:
    """Where scripts cannot push the message, it is sent behind them."""
    run_id = await worked(desk, 2)
    kept = await desk.queued()
    broker = own_redis()
    async with AsyncFleet(redis_url, broker_url=broker.url) as fleet:
        fork = await fleet.history.fork(run_id, at=1)
        with Redis.from_url(broker.url, decode_responses=True) as client:
            (message,) = client.lrange("stepfleet", 0, -1)
    assert await desk.queued() == kept
    args, *_ = json.loads(base64.b64decode(json.loads(message)["body"]))
    assert args == [fork, 1]


async def test_a_failed_step_can_be_left_out(fleet: AsyncFleet, desk: Bench) -> None:
    run_id = await worked(desk, 1, answer=False)
    claim = await desk.claim(run_id, 1)
    await desk.commit(claim, failed(claim))
    with pytest.raises(ConfigurationError, match="would end at once"):
        await fleet.history.fork(run_id)
    fork = await fleet.history.fork(run_id, at=1)
    assert (await desk.claim(fork, 1)).state.failures.total_failures == 0


async def test_two_runs_are_compared_step_by_step(fleet: AsyncFleet, desk: Bench) -> None:
    run_id = await worked(desk, 2)
    fork = await fleet.history.fork(run_id, at=1, model="openai:other", max_steps=9)
    for step in (1, 2):
        claim = await desk.claim(fork, step)
        await desk.commit(claim, called(claim, seconds=1.0))
    claim = await desk.claim(fork, 3)
    await desk.commit(claim, answered(claim, "fine\nbut longer"))

    found = await fleet.history.compare(run_id, fork)

    assert found.first_differing_step == 3
    assert found.differs_in == ("type", "thought", "tool_calls")
    assert not found.same_output
    assert found.output_diff[-1] == "+but longer"
    assert found.settings == {"model": ("openai:none", "openai:other"), "max_steps": (6, 9)}
    assert found.more["steps"] == 1
    assert found.more["tokens"] == 15
    assert found.more["cost_usd"] == pytest.approx(0.25)
    assert found.more["seconds"] == pytest.approx(1.5)
    assert found.second.origin is not None
    assert (await fleet.history.compare(run_id, run_id)).first_differing_step is None
