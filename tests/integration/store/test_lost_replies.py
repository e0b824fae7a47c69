"""Requests whose reply is lost after Redis has done them: done once, and answered as such."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from decimal import Decimal
from uuid import uuid4

import pytest
from support.runs.opened_runs import opened_run
from support.runs.scripted_steps import call
from support.runs.stored_runs import Bench, answered, bench, failed, plain_agent
from support.servers.redis_servers import RedisServer
from support.servers.trouble_proxy import TroubleProxy, troubled

from stepfleet.orchestrator import AsyncFleet, ConfigurationError, ErrorPolicy, Lifecycle
from stepfleet.orchestrator.limits.budgets import Spending
from stepfleet.orchestrator.limits.estimates import Amounts
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store import keys, lua
from stepfleet.orchestrator.store.admission import GRANTED, GrantRequest, settling
from stepfleet.orchestrator.store.fleet.quarantine import entry, keep_aside
from stepfleet.orchestrator.store.store import open_store
from stepfleet.orchestrator.tools.builtin import ask_person
from stepfleet.worker.runtime.admission.gate import Gate

MODEL = "openai:m"
AGENT = plain_agent(error_policy=ErrorPolicy.stop_on_any_error())


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[TroubleProxy]:
    redis_server.flush()
    with troubled(redis_server.port) as made:
        yield made


@pytest.fixture
async def desk(redis_server: RedisServer, proxy: TroubleProxy) -> AsyncIterator[Bench]:
    async with bench(redis_server.url, AGENT) as opened:
        # What a server does not know yet is refused, and not done: the reply to that is no loss.
        await lua.load(opened.opened.connection, *SCRIPTS)
        yield opened


SCRIPTS = (
    "admit",
    "cancel",
    "pause",
    "resume",
    "retry",
    "create",
    "clear_traces",
    "aside",
    "adopt",
    "add_schedule",
    "answer",
)


@pytest.fixture
async def fleet(redis_server: RedisServer, proxy: TroubleProxy) -> AsyncIterator[AsyncFleet]:
    """A client whose connection passes the proxy; it meets the server without one."""
    url = redis_server.url.replace(f":{redis_server.port}", f":{proxy.port}")
    async with AsyncFleet(url) as opened:
        await opened.overview()
        yield opened


@asynccontextmanager
async def reply_lost(proxy: TroubleProxy, script: str) -> AsyncIterator[None]:
    """The reply to the next call of `script` is lost."""
    lost = proxy.lose_reply_to(lua.digest(script))
    yield
    assert lost.is_set(), f"{script} was not called"


async def ended(desk: Bench, *, well: bool = True) -> str:
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await desk.commit(claim, answered(claim) if well else failed(claim))
    return run_id


async def test_a_message_is_given_once_though_the_reply_is_lost(
    fleet: AsyncFleet, desk: Bench, proxy: TroubleProxy
) -> None:
    run_id = await ended(desk)
    async with reply_lost(proxy, "retry"):
        assert (await fleet.runs.send(run_id, "and now?")).outcome == "sent"
    run = await desk.stored(run_id)
    assert [message.text for message in run.state.messages].count("and now?") == 1
    assert run.state.status is Lifecycle.IN_PROGRESS


async def test_a_message_is_given_once_though_the_run_has_ended_again(
    fleet: AsyncFleet, desk: Bench, proxy: TroubleProxy
) -> None:
    """A worker is faster than the repetition: the run has ended, as if nothing had been said."""
    run_id = await ended(desk)
    lost = proxy.lose_reply_to(lua.digest("retry"), and_stay_cut=True)
    sending = asyncio.create_task(fleet.runs.send(run_id, "and now?"))
    await asyncio.to_thread(lost.wait, 60)
    claim = await desk.claim(run_id, 1)
    await desk.commit(claim, answered(claim, "this"))
    proxy.heal()
    assert (await sending).outcome == "sent"
    result = await desk.stored(run_id)
    assert [message.text for message in result.state.messages].count("and now?") == 1
    assert result.state.status is Lifecycle.COMPLETED


async def test_a_retry_is_answered_as_done(
    fleet: AsyncFleet, desk: Bench, proxy: TroubleProxy
) -> None:
    run_id = await ended(desk, well=False)
    async with reply_lost(proxy, "retry"):
        assert (await fleet.runs.retry(run_id)).outcome == "retried"
    assert (await desk.counters())["open"] == 1


async def test_a_cancel_is_answered_as_done(
    fleet: AsyncFleet, desk: Bench, proxy: TroubleProxy
) -> None:
    run_id = await desk.create()
    async with reply_lost(proxy, "cancel"):
        assert (await fleet.runs.cancel(run_id)).outcome == "cancelled"
    assert (await desk.counters())["status:cancelled"] == 1


async def test_a_resume_is_answered_as_done_and_gives_one_hint(
    fleet: AsyncFleet, desk: Bench, proxy: TroubleProxy
) -> None:
    run_id = await desk.create()
    async with reply_lost(proxy, "pause"):
        assert (await fleet.runs.pause(run_id)).outcome == "paused"
    await desk.refused(run_id)  # whose message is gone now
    waiting = await desk.queued()
    async with reply_lost(proxy, "resume"):
        assert (await fleet.runs.resume(run_id)).outcome == "resumed"
    assert await desk.queued() == waiting + 1


async def test_a_repetition_writes_nothing_whatever_happened_since(desk: Bench) -> None:
    run_id = await desk.create()
    stored = await desk.stored(run_id)
    assert (await desk.control.pause(run_id, "first")).outcome == "paused"
    assert (await desk.control.resume(stored, "second")).outcome == "resumed"
    before = await desk.header(run_id)
    assert (await desk.control.pause(run_id, "first")).outcome == "paused"
    assert await desk.header(run_id) == before
    assert (await desk.control.cancel(stored, "", "third")).outcome == "cancelled"
    before = await desk.header(run_id)
    assert (await desk.control.resume(stored, "second")).outcome == "resumed"
    assert await desk.header(run_id) == before


async def test_only_the_newest_answers_are_remembered(desk: Bench) -> None:
    run_id = await desk.create()
    for number in range(30):
        await desk.control.pause(run_id, f"ask{number}")
    asked = (await desk.header(run_id))["asked"].splitlines()
    assert [line.split()[0] for line in asked] == [f"ask{n}" for n in range(29, 21, -1)]


async def test_a_run_is_created_once_and_told_as_new(
    redis_server: RedisServer, fleet: AsyncFleet, desk: Bench, proxy: TroubleProxy
) -> None:
    run_id = str(uuid4())
    async with reply_lost(proxy, "create"):
        assert await fleet.submit(AGENT, "hello", run_id=run_id) == run_id
    assert (await desk.stored(run_id)).state.status is Lifecycle.QUEUED
    assert await desk.queued() == 1


async def test_a_run_is_published_though_the_reply_to_its_creation_is_lost(
    redis_server: RedisServer, desk: Bench, proxy: TroubleProxy
) -> None:
    """With a broker of its own the hint follows the creation: only who is told of it sends it."""
    url = redis_server.url.replace(f":{redis_server.port}", f":{proxy.port}")
    broker = redis_server.url.rsplit("/", 1)[0] + "/1"
    settings = load_settings(redis_url=url, broker_url=broker)
    async with AsyncFleet(settings=settings) as fleet:
        await fleet.overview()
        async with reply_lost(proxy, "create"):
            await fleet.submit(AGENT, "hello")
    other = await open_store(load_settings(redis_url=redis_server.url, broker_url=broker))
    assert await other.dispatch.waiting() == 1
    await other.aclose()


async def test_what_is_put_aside_is_kept_once(
    redis_server: RedisServer, desk: Bench, proxy: TroubleProxy
) -> None:
    url = redis_server.url.replace(f":{redis_server.port}", f":{proxy.port}")
    store = await open_store(load_settings(redis_url=url))
    made = entry(b"x", "no task", "stepfleet")
    async with reply_lost(proxy, "aside"):
        await keep_aside(store.connection, made)
    await keep_aside(store.connection, entry(b"x", "no task", "stepfleet"))
    assert await store.connection.execute("LLEN", keys.QUARANTINE) == 2
    await store.aclose()


async def test_a_call_is_spent_once_though_the_reply_to_its_settlement_is_lost(
    redis_server: RedisServer, desk: Bench, proxy: TroubleProxy
) -> None:
    """Also where the grants were lost with the limits' keys, and no reply is."""
    url = redis_server.url.replace(f":{redis_server.port}", f":{proxy.port}")
    call = Spending(calls=1)
    async with bench(url) as far:
        gate = Gate(far.opened, "w1")
        await gate.settings.change(MODEL, {"calls": 9})
        first, second = (
            GrantRequest(Work(name, 0), "a", "", (MODEL,), Amounts(spending=call)) for name in "rs"
        )
        for one in (first, second):
            assert await gate.call(one.operation("try")) == GRANTED
        async with reply_lost(proxy, "admit"):
            await gate.call(settling(first.hint, Amounts(), call, (MODEL,)))
        (use,) = (one.budgets[0] for one in await gate.settings.use() if one.budgets)
        assert (use.spent, use.reserved) == (Decimal(1), Decimal(1))
        await desk.opened.connection.execute("DEL", desk.opened.keys.of(keys.LIMIT_GRANTS))
        await gate.call(settling(second.hint, Amounts(), call, (MODEL,)))
        (use,) = (one.budgets[0] for one in await gate.settings.use() if one.budgets)
        assert use.spent == Decimal(2)
        await gate.aclose()


async def test_a_schedule_is_added_once_with_its_lines(
    desk: Bench, fleet: AsyncFleet, proxy: TroubleProxy
) -> None:
    lines = [{"id": "a", "input": "x"}]
    async with reply_lost(proxy, "add_schedule"):
        added = await fleet.schedules.add("s", lines, AGENT, cron="@daily")
    store = desk.opened.schedules
    assert len(await store.rows(added.schedule)) == 1
    with pytest.raises(ConfigurationError, match="exists already"):
        await fleet.schedules.add("s", lines, AGENT, cron="@daily")


async def test_a_decision_is_the_callers_own(
    redis_server: RedisServer, desk: Bench, fleet: AsyncFleet, proxy: TroubleProxy
) -> None:
    script = call(("ask_person", {"question": "how many?"}))
    async with opened_run(redis_server.url, script, tools=(ask_person,)) as (_, hands, run_id):
        await hands.step(run_id, 0)
        async with reply_lost(proxy, "answer"):
            decided = await fleet.decide(run_id, answer="two", by="ada")
    assert (decided.applied, decided.late, decided.first) == (1, 0, None)
