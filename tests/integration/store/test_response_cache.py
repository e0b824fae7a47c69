"""The response cache on a real Redis: its entries, and steps that are answered from it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support.deadlines import until
from support.runs.scripted_steps import Crash, Hands, Script, call, say
from support.runs.stored_runs import bench, with_settings
from support.runs.tools import look
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator import (
    Agent,
    AgentConfig,
    AgentRunResult,
    AgentState,
    AsyncFleet,
    ConfigurationError,
    FinishReason,
    LLMResponse,
    Middleware,
    ModelRequest,
    RunStatus,
    UsageStats,
    tool,
)
from stepfleet.orchestrator.agents.reasoner import ModelTurn, Reasoner
from stepfleet.orchestrator.errors import ModelError, StrategyError
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.records.steps import Progress
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.response_cache import PARTS, CacheEntries
from stepfleet.orchestrator.store.store import open_store
from stepfleet.worker.agents import response_cache
from stepfleet.worker.agents.local import LocalAgent, LocalAgents
from stepfleet.worker.agents.response_cache import ResponseCache
from stepfleet.worker.ports import Ports

ROOM = 1 << 20
MODEL = "openai:m"
A, B, C = ("a" * 64, "b" * 64, "c" * 64)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is there is waited for, however busy the machine is."""
    monkeypatch.setattr(response_cache, "READ_SECONDS", 60.0)
    monkeypatch.setattr(response_cache, "KEEP_SECONDS", 60.0)


def spent(_model: str, usage: UsageStats, *_: str) -> float:
    return usage.total_tokens / 1000


@dataclass
class Keeping(Hands):
    """Hands of a worker that has the cache of the fleet, or another one."""

    entries: CacheEntries | None = None
    cache: ResponseCache = field(init=False)

    def __post_init__(self) -> None:
        entries = self.entries or with_settings(self.desk.opened, cache_bytes=ROOM).cache
        self.cache = ResponseCache(entries, spent)

    def ports(self) -> Ports:
        agents = LocalAgents([self.agent], self.models, cache=self.cache)
        return replace(super().ports(), agent=agents.find)

    async def run(self, **fields: Any) -> AgentRunResult:
        """Do a run to its end, and let what it leaves in the cache arrive there."""
        run_id = await self.desk.create(**fields)
        await self.finish(run_id)
        await self.cache.settle(30)
        return (await self.desk.stored(run_id)).result()

    @property
    def calls(self) -> int:
        """How many model calls were made."""
        assert isinstance(self.agent.llm, Script)
        return len(self.agent.llm.requests)


def talker(*answers: Any, cache: Any = True, **fields: Any) -> Agent:
    return Agent("talker", model=Script(answers), cache=cache, **fields)


@asynccontextmanager
async def keeping(url: str, agent: Agent) -> AsyncIterator[Keeping]:
    async with bench(url, agent) as desk:
        yield Keeping(desk, agent)


@asynccontextmanager
async def entries_at(url: str, room: int = ROOM) -> AsyncIterator[CacheEntries]:
    opened = await open_store(load_settings(redis_url=url))
    try:
        yield with_settings(opened, cache_bytes=room).cache
    finally:
        await opened.aclose()


# ------------------------------------------------------------------------------ entries


async def test_an_entry_is_read_until_its_time_is_over_and_leaves_the_statistics(
    redis_url: str,
) -> None:
    """CACHE-02, CACHE-08"""
    async with entries_at(redis_url) as entries:
        assert await entries.read(A, MODEL) is None
        assert await entries.keep(A, MODEL, "answer", 600)
        assert await entries.read(A, MODEL) == "answer"
        found = await entries.statistics()
        assert (found.entries, found.bytes, found.hits, found.misses) == (1, 6, 1, 1)
        assert await entries.keep(A, MODEL, "answer", 1)

        async def is_gone() -> bool:
            return await entries.read(A, MODEL) is None

        await until(is_gone, within=30, what="the entry's end")
        found = await entries.statistics()
        assert (found.entries, found.bytes) == (0, 0)


@pytest.mark.parametrize(("policy", "seconds"), [(True, 86_400), ({"ttl": 5000}, 5000)])
async def test_redis_itself_ends_an_entry_after_its_time(
    redis_url: str, policy: Any, seconds: int
) -> None:
    """CACHE-02: a day where nothing else is said."""
    async with keeping(redis_url, talker(say("fine"), cache=policy)) as hands:
        use = (await hands.run()).steps[0].cache
        assert use is not None
        execute = hands.desk.opened.connection.execute
        part = int(use.key[0], 16)
        left = await execute("TTL", f"sf:{{c{part:02d}}}:cache:entry:{use.key}")
        assert seconds - 400 < left <= seconds


async def test_writing_an_entry_twice_counts_it_once_with_its_newer_size(redis_url: str) -> None:
    """CACHE-08: also where a reply was lost and the call is repeated."""
    async with entries_at(redis_url) as entries:
        for text in ("long answer", "short", "short"):
            await entries.keep(A, MODEL, text, 60)
        found = await entries.statistics()
        assert (found.entries, found.bytes) == (1, 5)
        assert await entries.read(A, MODEL) == "short"


async def test_one_entry_one_model_or_all_are_dropped(redis_url: str) -> None:
    """CACHE-05"""
    keys = [f"{number:064x}"[::-1] for number in range(40)]
    async with entries_at(redis_url) as entries:
        for number, key in enumerate(keys):
            await entries.keep(key, MODEL if number % 4 else "openai:n o", "x", 60)
        assert await entries.drop(keys[1]) == 1
        assert await entries.drop(keys[1]) == 0
        assert await entries.read(keys[1], MODEL) is None
        assert await entries.read(keys[2], MODEL) == "x"
        assert await entries.drop_model("openai:n o") == 10
        assert await entries.drop_model("openai:n o") == 0
        found = await entries.statistics()
        assert {name: one.entries for name, one in found.by_model.items()} == {MODEL: 29}
        assert await entries.clear() == 29
        assert await entries.clear() == 0
        assert (await entries.statistics()).by_model == {}
        with pytest.raises(ConfigurationError, match="not the key of a cached answer"):
            await entries.drop("sf:*")


async def test_what_would_expire_next_makes_room_and_the_total_stays_below_its_bound(
    redis_url: str,
) -> None:
    """CACHE-08: the size bound; here all keys are in one part, which has a sixteenth of it."""
    async with entries_at(redis_url, 100 * PARTS) as entries:
        keys = [f"a{number:063}" for number in range(10)]
        for number, key in enumerate(keys):
            await entries.keep(key, MODEL, "x" * 30, 60 + number)
        found = await entries.statistics()
        assert (found.entries, found.bytes, found.max_bytes) == (3, 90, 1600)
        there = [key for key in keys if await entries.read(key, MODEL)]
        assert there == keys[-3:]
        assert not await entries.keep(A, MODEL, "x" * 101, 60)
        assert await entries.keep(B, MODEL, "x" * 100, 60)


async def test_an_entry_that_redis_has_evicted_leaves_the_statistics_when_it_is_met(
    redis_url: str, redis_server: RedisServer
) -> None:
    """CACHE-08"""
    opened = await open_store(load_settings(redis_url=redis_url))
    entries = with_settings(opened, cache_bytes=ROOM).cache
    await entries.keep(A, MODEL, "answer", 60)
    await opened.connection.execute("DEL", f"sf:{{c10}}:cache:entry:{A}")
    assert await entries.read(A, MODEL) is None
    assert (await entries.statistics()).entries == 0
    await opened.aclose()


# ------------------------------------------------------------------------------ steps


async def test_equal_requests_are_calls_without_a_policy(redis_url: str) -> None:
    """CACHE-01"""
    async with keeping(redis_url, talker(say("fine"), cache=None)) as hands:
        first, second = await hands.run(), await hands.run()
        assert hands.calls == 2
        assert [one.steps[0].cache for one in (first, second)] == [None, None]
        found = await with_settings(hands.desk.opened, cache_bytes=ROOM).cache.statistics()
        assert found.by_model == {}


async def test_the_second_of_two_equal_runs_is_answered_without_calls(redis_url: str) -> None:
    """CACHE-04, CACHE-09, COST-13: text, tool calls, and what the second costs: nothing."""
    asked = call(("look", {"what": "sun"}))
    async with keeping(redis_url, talker(asked, say("It shines."), tools=[look])) as hands:
        first, second = await hands.run(), await hands.run()
        assert hands.calls == 2
        assert [step.cached for step in first.steps] == [False, False]
        assert [step.cached for step in second.steps] == [True, True]
        assert (second.status, second.output) == (RunStatus.COMPLETED, first.output)
        assert second.steps[0].tool_calls[0].result == "seen sun"
        assert [step.cache.key for step in first.steps if step.cache] == [
            step.cache.key for step in second.steps if step.cache
        ]
        assert first.usage == UsageStats(
            prompt_tokens=20, completion_tokens=10, total_tokens=30, llm_calls=2
        )
        assert second.usage == UsageStats(cached_calls=2)
        assert (first.cost_usd, first.saved_usd) == (0.03, 0)
        assert (second.cost_usd, second.saved_usd) == (0, 0.03)
        counters = await hands.desk.counters()
        assert (counters["calls"], counters["tokens"]) == (2, 30)


async def test_an_agents_own_prices_say_what_was_saved(redis_url: str) -> None:
    """COST-13"""
    agent = talker(say("fine"), pricing={"input": 1e6, "output": 0})
    async with keeping(redis_url, agent) as hands:
        await hands.run()
        assert (await hands.run()).saved_usd == 10


async def test_what_one_worker_has_asked_another_knows(redis_url: str) -> None:
    """CACHE-06"""
    async with keeping(redis_url, talker(say("of one"))) as one:
        await one.run()
        async with keeping(redis_url, talker(say("of two"))) as two:
            assert (await two.run()).output == "of one"
            assert (one.calls, two.calls) == (1, 0)


async def test_another_agent_with_a_model_object_of_the_same_kind_is_another_provider(
    redis_url: str,
) -> None:
    """CACHE-03: what such an object answers may depend on what it was made with."""
    other = Agent("other", model=Script([say("mine")]), cache=True)
    async with keeping(redis_url, talker(say("fine"))) as hands:
        await hands.run()
    async with keeping(redis_url, other) as hands:
        assert (await hands.run()).output == "mine"


async def test_model_objects_may_say_themselves_which_are_alike(redis_url: str) -> None:
    """CACHE-03"""
    for name, expected in (("one", 1), ("two", 0)):
        script = Script([say("fine")])
        script.cache_identity = "scripts of today"  # type: ignore[attr-defined]
        async with keeping(redis_url, Agent(name, model=script, cache=True)) as hands:
            await hands.run()
            assert hands.calls == expected


@pytest.mark.parametrize(
    "answer",
    [
        ModelError("broken", retryable=False),
        say("cut o", finish_reason=FinishReason.LENGTH),
        say("fi", finish_reason=FinishReason.CONTENT_FILTER),
        say(""),
    ],
)
async def test_failures_and_parts_of_answers_are_asked_for_again(
    answer: Any, redis_url: str
) -> None:
    """CACHE-07: an agent that allows empty answers asks for them anew, too."""
    async with keeping(redis_url, talker(answer, allow_empty_answer=True)) as hands:
        await hands.run()
        await hands.run()
        assert hands.calls == 2
        found = await with_settings(hands.desk.opened, cache_bytes=ROOM).cache.statistics()
        assert (found.entries, found.hits, found.misses) == (0, 0, 2)


async def test_an_answer_that_its_contract_refuses_is_asked_for_again(redis_url: str) -> None:
    """CACHE-07: kept, it would be refused in every run."""
    strict = talker(say("it is 42"), require_final_answer=True, max_steps=1)
    async with keeping(redis_url, strict) as hands:
        for calls in (1, 2):
            result = await hands.run()
            assert (result.stop_reason, hands.calls) == ("steps_limit", calls)
        found = await with_settings(hands.desk.opened, cache_bytes=ROOM).cache.statistics()
        assert (found.entries, found.hits) == (0, 0)


async def test_a_run_may_renew_the_entry_or_go_without_it(redis_url: str) -> None:
    """CACHE-01, CACHE-05"""
    async with keeping(redis_url, talker(say("old"))) as hands:
        await hands.run()
        assert isinstance(hands.agent.llm, Script)
        hands.agent.llm.answers = [say("new")]
        assert (await hands.run(overrides={"cache": None})).output == "new"
        assert (await hands.run()).output == "old"
        assert (await hands.run(overrides={"cache": {"refresh": True}})).output == "new"
        assert (await hands.run()).output == "new"
        assert hands.calls == 3


class Sensible(Reasoner):
    """Fails at gibberish."""

    async def read(self, turn: ModelTurn, state: AgentState) -> Progress | None:
        if turn.response.content == "gibberish":
            raise StrategyError("that means nothing")
        return None


class Code(LocalAgent):
    """An agent's code with that reasoner."""

    def reasoner(self, config: AgentConfig) -> Reasoner:
        return Sensible()


class Reading(Keeping):
    """Hands that read what answers mean."""

    def ports(self) -> Ports:
        code = Code(self.agent, self.agent.tools, self.models, cache=self.cache)
        return replace(super().ports(), agent=lambda _: code)


@tool
def break_down(what: str) -> str:
    """Fail."""
    raise ValueError(what)


async def test_a_hit_whose_tool_failed_stays_a_hit_when_the_run_is_retried(redis_url: str) -> None:
    """CACHE-09: its answer comes from the journal then."""
    asked = call(("break_down", {"what": "all"}))
    async with keeping(redis_url, talker(asked, tools=[break_down])) as hands:
        await hands.run()
        run_id = await hands.desk.create()
        async with AsyncFleet(redis_url) as fleet:
            await hands.finish(run_id)
            await fleet.runs.retry(run_id)
            await hands.finish(run_id)
            result = await fleet.runs.result(run_id)
        assert hands.calls == 1
        assert (len(result.steps), result.steps[0].cached) == (1, True)
        assert result.usage == UsageStats(cached_calls=1)


async def test_an_answer_that_fails_by_what_it_means_is_asked_for_again(redis_url: str) -> None:
    """CACHE-07: else no retry could help, nor any other run."""
    agent = talker(say("gibberish"))
    async with bench(redis_url, agent) as desk:
        hands = Reading(desk, agent)
        for calls in (1, 2):
            assert (await hands.run()).status is RunStatus.ERROR
            assert hands.calls == calls
        assert isinstance(agent.llm, Script)
        agent.llm.answers = [say("sense")]
        for cached in (False, True):
            assert [step.cached for step in (await hands.run()).steps] == [cached]
        assert hands.calls == 3


async def test_a_policy_for_other_models_changes_nothing(redis_url: str) -> None:
    """CACHE-01: enabled per model."""
    async with keeping(redis_url, talker(say("fine"), cache={"models": [MODEL]})) as hands:
        await hands.run()
        await hands.run()
        assert hands.calls == 2


async def test_answers_above_the_limit_are_not_kept(redis_url: str) -> None:
    """CACHE-08"""
    async with keeping(redis_url, talker(say("ä" * 300), cache={"max_entry_bytes": 500})) as hands:
        await hands.run()
        await hands.run()
        assert hands.calls == 2


async def test_a_step_that_is_done_again_behind_a_crash_counts_its_hit_once(redis_url: str) -> None:
    """CACHE-09, COST-13: reads are counted as they happen, what is committed once."""
    async with keeping(redis_url, talker(say("fine"))) as hands:
        await hands.run()
        run_id = await hands.desk.create()
        hands.crash_at = "before-commit"
        with pytest.raises(Crash):
            await hands.step(run_id, 0)
        await hands.desk.opened.connection.execute(
            "HSET", hands.desk.opened.keys.run(run_id), "lease", 0
        )
        await hands.finish(run_id)
        result = (await hands.desk.stored(run_id)).result()
        assert (hands.calls, result.usage) == (1, UsageStats(cached_calls=1))
        found = await with_settings(hands.desk.opened, cache_bytes=ROOM).cache.statistics()
        assert found.hits == 2


async def test_a_hit_that_was_journaled_is_one_for_the_worker_that_goes_on(redis_url: str) -> None:
    """CACHE-09: the entry may be gone by then."""
    asked = call(("look", {"what": "sun"}))
    async with keeping(redis_url, talker(asked, say("It shines."), tools=[look])) as hands:
        await hands.run()
        run_id = await hands.desk.create()
        hands.crash_at = "after-tool"
        with pytest.raises(Crash):
            await hands.step(run_id, 0)
        await with_settings(hands.desk.opened, cache_bytes=ROOM).cache.clear()
        await hands.desk.opened.connection.execute(
            "HSET", hands.desk.opened.keys.run(run_id), "lease", 0
        )
        await hands.finish(run_id)
        result = (await hands.desk.stored(run_id)).result()
        assert [step.cached for step in result.steps] == [True, False]
        assert (result.usage.cached_calls, result.usage.llm_calls) == (1, 1)


class Noting(Middleware):
    """Notes what it is asked, and adds a word to each answer."""

    def __init__(self) -> None:
        self.asked = 0

    async def around_model(self, request: ModelRequest, call_next: Any) -> LLMResponse:
        self.asked += 1
        response: LLMResponse = await call_next(request)
        return response.model_copy(update={"content": f"{response.content} Indeed."})


async def test_an_agents_middleware_sees_hits_too_and_what_it_does_is_not_kept(
    redis_url: str,
) -> None:
    noting = Noting()
    async with keeping(redis_url, talker(say("Yes."), middleware=[noting])) as hands:
        first, second = await hands.run(), await hands.run()
        assert (first.output, second.output) == ("Yes. Indeed.", "Yes. Indeed.")
        assert (noting.asked, hands.calls) == (2, 1)
        assert second.steps[0].cached


class Refusing(Middleware):
    """Takes the third answer that it sees, whatever it says."""

    def __init__(self) -> None:
        self.seen = 0

    async def around_model(self, request: ModelRequest, call_next: Any) -> LLMResponse:
        answer: LLMResponse = await call_next(request)
        self.seen += 1
        if self.seen < 3:
            raise ModelError("not that one", retryable=False)
        return answer


async def test_an_answer_that_middleware_refuses_is_asked_for_again(redis_url: str) -> None:
    """CACHE-07: or no retry could ever help."""
    agent = talker(say("so"), middleware=[Refusing()])
    async with keeping(redis_url, agent) as hands:
        results = [await hands.run() for _ in range(3)]
        assert [one.status for one in results] == [RunStatus.ERROR] * 2 + [RunStatus.COMPLETED]
        assert hands.calls == 3


async def test_a_kept_answer_is_reported_as_one_piece_where_text_is_streamed(
    redis_url: str,
) -> None:
    """CACHE-04"""
    async with keeping(redis_url, talker(say("One piece."))) as hands:
        await hands.run()
        claim = await hands.desk.claim(await hands.desk.create())
        assert isinstance(claim, Claim)
        agent: Any = hands.ports().agent(claim.config)
        heard: list[str] = []
        request = ModelRequest(model=claim.config.model, messages=claim.state.messages)
        response = await agent.generate(request, heard.append, claim.config)
        assert (response.cache.hit, heard, hands.calls) == (True, ["One piece."], 1)


# ------------------------------------------------------------------------------ trouble


async def test_a_cache_that_is_away_holds_no_step_up(
    redis_url: str, own_redis: Callable[..., RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CACHE-04: calls are made, and counted as calls."""
    for name in ("READ_SECONDS", "KEEP_SECONDS"):
        monkeypatch.setattr(response_cache, name, 0.5)
    server = own_redis()
    agent = talker(say("fine"))
    async with entries_at(server.url) as entries, bench(redis_url, agent) as desk:
        server.kill()
        hands = Keeping(desk, agent, entries=entries)
        result = await hands.run()
        assert (result.status, hands.calls) == (RunStatus.COMPLETED, 1)
        assert (result.usage.llm_calls, result.usage.cached_calls) == (1, 0)
        server.start()


async def test_a_redis_that_is_full_gives_what_it_has_and_holds_no_step_up(
    redis_url: str, own_redis: Callable[..., RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CACHE-04, CACHE-08"""
    server = own_redis()
    agent = talker(say("fine"))
    async with entries_at(server.url) as entries, bench(redis_url, agent) as desk:
        hands = Keeping(desk, agent, entries=entries)
        await hands.run()
        opened = await open_store(load_settings(redis_url=server.url))
        await opened.connection.execute("CONFIG", "SET", "maxmemory", "1")
        assert (await hands.run()).steps[0].cached
        monkeypatch.setattr(response_cache, "KEEP_SECONDS", 0.5)
        renewed = await hands.run(overrides={"cache": {"refresh": True}})
        assert (renewed.status, hands.calls) == (RunStatus.COMPLETED, 2)
        await opened.connection.execute("CONFIG", "SET", "maxmemory", "0")
        await opened.aclose()


async def test_an_entry_that_nobody_can_read_is_a_call(redis_url: str) -> None:
    async with keeping(redis_url, talker(say("fine"))) as hands:
        first = await hands.run()
        assert first.steps[0].cache
        key, model = first.steps[0].cache.key, hands.agent.config.model
        entries = with_settings(hands.desk.opened, cache_bytes=ROOM).cache
        await entries.keep(key, model, '{"not":"ours"}', 60)
        again = await hands.run()
        assert (hands.calls, again.steps[0].cached) == (2, False)
        assert (await hands.run()).steps[0].cached


async def test_reads_of_many_steps_travel_together_and_find_the_same(redis_url: str) -> None:
    async with entries_at(redis_url) as entries:
        await asyncio.gather(*(entries.keep(key, MODEL, key[:1], 60) for key in (A, B, C)))
        found = await asyncio.gather(*(entries.read(key, MODEL) for key in (A, B, C) * 50))
        assert found == ["a", "b", "c"] * 50
        assert (await entries.statistics()).hits == 150
