"""Memory policies on whole steps over a real Redis: windows, summaries, learned limits."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
from support.deadlines import until
from support.runs.scripted_steps import Crash, Hands, say
from support.runs.stored_runs import Bench, bench
from support.runs.talking_models import Talker, WeighedStore, look

from stepfleet.orchestrator import (
    Agent,
    AgentState,
    AsyncFleet,
    ConfigurationError,
    ErrorPolicy,
    Lifecycle,
    LLMResponse,
    MemoryPolicy,
    Message,
    ModelRequest,
    RunStatus,
    tool,
)
from stepfleet.orchestrator.agents.recall import KeywordMemory
from stepfleet.orchestrator.errors import ContextWindowError, ModelError
from stepfleet.orchestrator.memory.conversation import SUMMARY
from stepfleet.orchestrator.memory.policy import CONTEXT
from stepfleet.orchestrator.memory.pruning import estimate_tokens
from stepfleet.orchestrator.protocol.revision import further_turn, revise
from stepfleet.orchestrator.records.steps import StepType
from stepfleet.orchestrator.store.runs.submission import NewRun
from stepfleet.worker.engine.bridge import TIME_IS_UP

Opened = Callable[..., AbstractAsyncContextManager[tuple[Bench, Hands, Talker, str]]]
LIMITS = {"max_steps": 3000, "token_limit": None, "time_limit": None}


def newest_only(messages: Sequence[Message], state: AgentState) -> Sequence[Message]:
    """Keep the question and the newest two messages, which may part a call from its result."""
    assert state.agent_id
    return [messages[0], messages[1], *messages[2:][-1:]]


async def failing(messages: Sequence[Message], state: AgentState) -> Sequence[Message]:
    raise RuntimeError("out of order")


@pytest.fixture
def opened(redis_url: str) -> Opened:
    @asynccontextmanager
    async def open_run(
        answer: Callable[[int, ModelRequest], Any], **config: Any
    ) -> AsyncIterator[tuple[Bench, Hands, Talker, str]]:
        talker = Talker(answer)
        given = {"instructions": "Be brief.", **LIMITS, **config}
        agent = Agent("talker", model=talker, tools=[look_at], **given)
        async with bench(redis_url, agent, lease=0.5, grace=60) as desk:
            yield desk, Hands(desk, agent), talker, await desk.create()

    return open_run


@tool(name="look")
def look_at(at: str) -> str:
    """Look somewhere.

    Args:
        at: Where.
    """
    return f"seen {at} " + "x" * 60


def looks(number: int, _: ModelRequest) -> Any:
    return look(number)


async def created(desk: Bench, *messages: Message, **config: Any) -> str:
    """Create a run of the desk's agent with these messages, and its configuration changed."""
    changed = desk.agent.config.model_copy(update=config)
    digest = await desk.opened.configs.save(changed)
    run = NewRun(str(uuid4()), changed.name, digest, messages, changed.max_steps)
    assert await desk.submission.create(run)
    return run.run_id


async def steps(hands: Hands, run_id: str, number: int, start: int = 0) -> None:
    for step in range(start, start + number):
        report = await hands.step(run_id, step)
        assert report.applied, report


def check_pairs(messages: Sequence[Message]) -> None:
    asked: list[str] = []
    for message in messages:
        if message.is_tool():
            assert asked.pop(0) == message.tool_call_id
        else:
            assert asked == []
            asked = [one.id for one in message.tool_calls]
    assert asked == []


def prefix_changes(requests: Sequence[ModelRequest]) -> int:
    pairs = itertools.pairwise(requests)
    return sum(after.messages[: len(before.messages)] != before.messages for before, after in pairs)


async def test_a_request_holds_the_newest_messages_and_its_beginning_seldom_changes(
    opened: Opened,
) -> None:
    """MEM-04, MEM-06, MEM-08: 30 steps under a limit of 12; calls stay with their results."""
    policy = MemoryPolicy(max_messages=12)
    async with opened(looks, memory=policy) as (_, hands, talker, run_id):
        await steps(hands, run_id, 30)
    for request in talker.requests:
        system, task, *rest = request.messages
        assert (system.text, task.text) == ("Be brief.", "hello")
        assert 1 + len(rest) <= 12
        check_pairs(request.messages)
    newest = talker.requests[-1].messages[-1]
    assert newest.text.startswith("seen 29 ")
    changes = prefix_changes(talker.requests)
    print(f"30 requests under max_messages=12: the prefix changed {changes} times")  # noqa: T201
    assert changes == 12


async def test_without_a_policy_no_prefix_ever_changes(opened: Opened) -> None:
    async with opened(looks) as (desk, hands, talker, run_id):
        await steps(hands, run_id, 12)
        assert prefix_changes(talker.requests) == 0
        assert "since" not in await desk.header(run_id)
        assert (await desk.claim(run_id, 12)).history is None


async def test_what_a_claim_reads_stays_flat_over_500_steps(opened: Opened) -> None:
    """MEM-16: requests and claims are bounded by the policy, results still have every step."""
    policy = MemoryPolicy(max_messages=20)
    async with opened(looks, memory=policy) as (desk, hands, talker, run_id):
        desk.steps = store = WeighedStore.over(desk.steps)
        await steps(hands, run_id, 500)
        early, late = max(store.claimed[20:60]), max(store.claimed[-40:])
        shown = [early, late, max(len(one.messages) for one in talker.requests)]
        print(f"bytes of log per claim: {shown[0]} early, {shown[1]} late; messages: {shown[2]}")  # noqa: T201
        assert late <= early + 400  # the numbers of steps get longer
        assert shown[2] <= 21
        stored = await desk.stored(run_id)
    assert len(stored.result().steps) == 500
    assert stored.state.usage.total_tokens == 500 * 15
    assert len(stored.state.messages) == 2 + 500 * 2


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_run_of_2000_steps_takes_no_more_than_one_of_1300(opened: Opened) -> None:
    """MEM-16: bytes in Redis, bytes per claim, messages and tokens per request."""
    policy = MemoryPolicy(max_messages=10, max_tokens=500, trim_log=True)
    async with opened(looks, memory=policy) as (desk, hands, talker, run_id):
        desk.steps = store = WeighedStore.over(desk.steps)
        await steps(hands, run_id, 1300)
        before = await weight(desk, run_id)
        await steps(hands, run_id, 700, start=1300)
        after = await weight(desk, run_id)
        stored = await desk.stored(run_id)
    print(f"bytes in Redis: {before} behind 1300 steps, {after} behind 2000")  # noqa: T201
    assert after < before * 1.1
    assert max(store.claimed[-500:]) <= max(store.claimed[20:60]) + 600
    assert max(len(one.messages) for one in talker.requests) <= 11
    most = max(sum(map(estimate_tokens, one.messages)) for one in talker.requests)
    assert most <= 500
    assert stored.state.session_usage.total_tokens == 2000 * 15


async def turns(desk: Bench, hands: Hands, run_id: str, numbers: range) -> None:
    """Ask one question after the other, each a turn of one step."""
    for number in numbers:
        if number:
            assert await further(desk, run_id, f"question {number}") == number
        await steps(hands, run_id, 1, start=number)


async def test_a_session_of_150_turns_takes_little_more_than_one_of_50(opened: Opened) -> None:
    """MEM-16: messages given for each turn go with the steps; events have their own bound."""
    policy = MemoryPolicy(max_messages=6, trim_log=True)
    async with opened(lambda n, _: say(f"answer {n}"), memory=policy) as (desk, hands, _, run_id):
        await turns(desk, hands, run_id, range(50))
        before = await weight(desk, run_id, but=":events")
        await turns(desk, hands, run_id, range(50, 150))
        after = await weight(desk, run_id, but=":events")
        assert (await desk.stored(run_id)).state.session_steps == 150
    assert after < before * 1.3  # what 50 turns and two digits take, with three


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_session_of_2000_turns_takes_no_more_than_one_of_1300(opened: Opened) -> None:
    """MEM-16: every key of the run, its events among them."""
    policy = MemoryPolicy(max_messages=6, trim_log=True)
    async with opened(lambda n, _: say(f"answer {n}"), memory=policy) as (desk, hands, _, run_id):
        await turns(desk, hands, run_id, range(1300))
        before = await weight(desk, run_id)
        await turns(desk, hands, run_id, range(1300, 2000))
        after = await weight(desk, run_id)
        assert (await desk.stored(run_id)).state.session_steps == 2000
    print(f"bytes in Redis: {before} behind 1300 turns, {after} behind 2000")  # noqa: T201
    assert after < before * 1.1


async def weight(desk: Bench, run_id: str, but: str = "-") -> int:
    """Return how many bytes all keys of a run take, except those that end with `but`."""
    connection = desk.opened.connection
    found = await connection.execute("KEYS", f"{desk.opened.keys.run(run_id)}*")
    names = [name for name in found if not name.endswith(but)]
    asked = [("MEMORY", "USAGE", name, "SAMPLES", 0) for name in names]
    return sum(await connection.execute_all(*asked))


async def test_a_trimmed_run_goes_on_and_tells_what_it_has_left(
    opened: Opened, redis_url: str
) -> None:
    """MEM-16: results, further turns and retries work; forks are refused with the reason."""
    policy = MemoryPolicy(max_messages=6, trim_log=True)
    stop = ErrorPolicy.stop_on_any_error()
    async with opened(looks, memory=policy, error_policy=stop) as (desk, hands, talker, run_id):
        talker.answer = lambda n, _: ModelError("refused") if n == 12 else look(n)
        await steps(hands, run_id, 12)
        failed = await desk.stored(run_id)
        assert failed.step == 12
        assert failed.first > 5
        assert [step.result.step for step in failed.log] == list(range(failed.first + 1, 13))
        assert failed.result().usage.llm_calls == 11
        names = await desk.opened.connection.execute("HKEYS", f"{desk.opened.keys.run(run_id)}:log")
        assert sum(not name.startswith("by:") for name in names) <= len(failed.log) + 1
        revision = revise(failed.state, failed.log, {}, await desk.runs.now())
        await desk.control.retry(failed, revision)
        talker.answer = lambda _n, _: say("done")
        await steps(hands, run_id, 1, start=12)
        check_pairs(talker.requests[-1].messages)
        assert await further(desk, run_id, "and now?") == 13
        await steps(hands, run_id, 1, start=13)
        assert talker.requests[-1].messages[-1].text == "and now?"
        stored = await desk.stored(run_id)
        assert stored.state.session_steps == 14
        assert stored.state.messages[1].text == "hello"
        async with AsyncFleet(redis_url) as fleet:
            with pytest.raises(ConfigurationError, match=r"memory\.trim_log"):
                await fleet.history.fork(run_id, at=13)


async def test_the_window_is_the_same_however_often_a_run_is_taken_up_again(
    opened: Opened,
) -> None:
    """MEM-08: it is a function of the log: header, rebuilt log and full read agree."""
    policy = MemoryPolicy(max_messages=8)
    async with opened(looks, memory=policy, error_policy=ErrorPolicy.stop_on_any_error()) as (
        desk,
        hands,
        talker,
        run_id,
    ):
        talker.answer = lambda n, _: ModelError("down") if n == 12 else look(n)
        await steps(hands, run_id, 12)
        before = await desk.stored(run_id)
        assert before.state.status is Lifecycle.FAILED
        revision = revise(before.state, before.log, {}, await desk.runs.now())
        assert revision.state.window == before.state.window
        await desk.control.retry(before, revision)
        await steps(hands, run_id, 1, start=11)
        assert talker.requests[-1].messages == talker.requests[-2].messages
        assert (await desk.stored(run_id)).state.window == before.state.window


async def test_a_token_limit_comes_behind_the_message_limit(opened: Opened) -> None:
    """MEM-05, MEM-09, LLM-14: and the newest exchange stays even if it alone is too long."""
    policy = MemoryPolicy(max_messages=50, max_tokens=200)
    async with opened(looks, memory=policy) as (desk, hands, talker, run_id):
        await steps(hands, run_id, 15)
        sizes = [sum(map(estimate_tokens, one.messages)) for one in talker.requests]
        assert 100 < max(sizes) <= 200
        assert sum(map(estimate_tokens, (await desk.stored(run_id)).state.messages)) > 400
        talker.answer = lambda n, _: look(n, "y" * 4000)
        await steps(hands, run_id, 2, start=15)
    check_pairs(talker.requests[-1].messages)
    assert [one.role for one in talker.requests[-1].messages] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]


async def test_a_summary_stands_for_what_is_left_out(opened: Opened) -> None:
    """MEM-07: instructions, summary, the task, recent steps; the next summary builds on it."""
    policy = MemoryPolicy(summarize_after=8)
    async with opened(looks, memory=policy) as (desk, hands, talker, run_id):
        desk.steps = store = WeighedStore.over(desk.steps)
        await steps(hands, run_id, 14)
        stored = await desk.stored(run_id)
        assert store.claimed[-1] < sum(len(step.to_json()) for step in stored.log)
    first = next(one for one in talker.requests if one.messages[1].text.startswith(SUMMARY))
    assert [one.text for one in first.messages[:3]] == ["Be brief.", f"{SUMMARY}summary 1", "hello"]
    check_pairs(first.messages)
    assert "seen 1 " in talker.summaries[0].messages[1].text
    assert not talker.summaries[0].tools
    assert "summary so far: summary 1" in talker.summaries[1].messages[1].text
    assert "seen 1 " not in talker.summaries[1].messages[1].text
    assert max(len(one.messages) for one in talker.requests) <= 3 + 8
    made = [step.result.step for step in stored.log if step.remembered and step.remembered.summary]
    assert len(made) == len(talker.summaries) >= 2
    assert prefix_changes(talker.requests) == len(talker.summaries)


async def test_a_summary_is_counted_in_the_usage_and_cost_of_its_step(opened: Opened) -> None:
    """MEM-15"""
    policy = MemoryPolicy(summarize_after=4)
    async with opened(looks, memory=policy) as (desk, hands, talker, run_id):
        await steps(hands, run_id, 3)
        result = (await desk.stored(run_id)).result()
        counters = await desk.counters()
    assert len(talker.summaries) == 1
    assert [(one.usage.llm_calls, one.usage.total_tokens) for one in result.steps if one.usage] == [
        (1, 15),
        (1, 15),
        (2, 30),
    ]
    assert result.usage.llm_calls == 4
    assert result.cost_usd == pytest.approx(4 * 15 / 1000)
    assert (counters["tokens"], counters["calls"]) == (60, 4)


@pytest.mark.parametrize(
    ("point", "summaries", "calls"),
    [("after-journal", 1, 1), ("after-reply", 1, 2), ("before-commit", 1, 1)],
)
async def test_a_summary_that_is_journaled_is_not_made_again(
    opened: Opened, point: str, summaries: int, calls: int
) -> None:
    """MEM-15: the worker ends behind the summary; the next one uses it, and it costs once."""
    policy = MemoryPolicy(summarize_after=4)
    async with opened(looks, memory=policy) as (desk, hands, talker, run_id):
        await steps(hands, run_id, 2)
        before = len(talker.requests)
        hands.crash_at = point
        with pytest.raises(Crash):
            await hands.step(run_id, 2)

        async def expired() -> bool:
            now = (await desk.runs.now()).timestamp() * 1000
            return now > int((await desk.header(run_id))["lease"])

        await until(expired, within=30)
        await steps(hands, run_id, 1, start=2)
        result = (await desk.stored(run_id)).result()
    assert (len(talker.summaries), len(talker.requests) - before) == (summaries, calls)
    assert talker.requests[-1].messages[1].text == f"{SUMMARY}summary 1"
    assert result.usage.llm_calls == 4
    assert result.steps[2].cost_usd == pytest.approx(0.03)


async def test_a_step_that_fails_behind_its_summary_pays_for_it(opened: Opened) -> None:
    """MEM-15"""
    policy = MemoryPolicy(summarize_after=4)
    async with opened(looks, memory=policy) as (desk, hands, talker, run_id):
        talker.answer = lambda n, _: ModelError("refused") if n == 3 else look(n)
        await steps(hands, run_id, 3)
        result = (await desk.stored(run_id)).result()
    assert result.steps[2].type is StepType.ERROR
    assert result.steps[2].usage is not None
    assert (result.steps[2].usage.llm_calls, result.steps[2].cost_usd) == (1, 0.015)
    assert len(talker.summaries) == 1
    assert result.usage.llm_calls == 3


async def test_a_retried_step_uses_the_summary_that_it_had_made(opened: Opened) -> None:
    """MEM-15"""
    policy = MemoryPolicy(summarize_after=4)
    stop = ErrorPolicy.stop_on_any_error()
    async with opened(looks, memory=policy, error_policy=stop) as (desk, hands, talker, run_id):
        talker.answer = lambda n, _: ModelError("refused") if n == 3 else look(n)
        await steps(hands, run_id, 3)
        stored = await desk.stored(run_id)
        assert stored.state.status is Lifecycle.FAILED
        revision = revise(stored.state, stored.log, {}, await desk.runs.now())
        await desk.control.retry(stored, revision)
        await steps(hands, run_id, 1, start=2)
        result = (await desk.stored(run_id)).result()
    assert len(talker.summaries) == 1
    assert result.usage.llm_calls == 4
    assert result.usage.total_tokens == 60


async def test_a_window_that_the_model_has_refused_is_not_tried_again(opened: Opened) -> None:
    """MEM-10, ERR-23: later steps start with what had fitted."""

    def answer(number: int, request: ModelRequest) -> Any:
        if sum(map(estimate_tokens, request.messages)) > 200:
            return ContextWindowError("too long", limit=200)
        return look(number)

    async with opened(answer) as (desk, hands, talker, run_id):
        await steps(hands, run_id, 20)
        stored = await desk.stored(run_id)
        header = await desk.header(run_id)
    assert all(step.result.type is StepType.TOOL_EXECUTION for step in stored.log)
    assert len(talker.requests) == 21
    assert stored.state.window is not None
    assert stored.state.window.limit is not None
    assert stored.state.window.limit <= 200
    assert int(header["since"].split()[0]) > 10


async def test_a_conversation_over_several_turns_shows_the_newest_ones(opened: Opened) -> None:
    """MEM-16: each turn's claim reads the window, also behind a further message."""
    policy = MemoryPolicy(max_messages=6)
    async with opened(lambda n, _: say(f"answer {n}"), memory=policy) as (
        desk,
        hands,
        talker,
        run_id,
    ):
        desk.steps = store = WeighedStore.over(desk.steps)
        await steps(hands, run_id, 1)
        for turn in range(1, 40):
            stored = await desk.stored(run_id)
            from_here = await further(desk, run_id, f"question {turn}")
            assert from_here == stored.step
            await steps(hands, run_id, 1, start=turn)
        assert max(store.claimed[-5:]) <= max(store.claimed[5:15]) + 20
    assert [one.text for one in talker.requests[-1].messages][-3:] == [
        "question 38",
        "answer 39",
        "question 39",
    ]
    assert all(request.messages[1].is_user() for request in talker.requests)
    assert max(len(request.messages) for request in talker.requests) <= 7


async def further(desk: Bench, run_id: str, text: str) -> int:
    """Give an ended run a further message; return the step at which it goes on."""
    stored = await desk.stored(run_id)
    turn = further_turn(stored.state, stored.log, {}, await desk.runs.now())
    answer = await desk.control.retry(stored, turn, (Message.user(text),))
    assert answer.outcome == "retried"
    return turn.step


async def test_a_long_list_of_messages_given_at_once_is_limited_too(opened: Opened) -> None:
    """MEM-04"""
    policy = MemoryPolicy(max_messages=4)
    async with opened(looks, memory=policy) as (desk, hands, talker, _):
        given = [Message.user(f"note {n}") for n in range(30)]
        run_id = await created(desk, Message.system("Mind the gap."), *given)
        await steps(hands, run_id, 6)
    first, last = talker.requests[0].messages, talker.requests[-1].messages
    told = ["Be brief.", "Mind the gap."]
    assert [one.text for one in first] == [*told, *(f"note {n}" for n in range(26, 30))]
    assert [one.text for one in last[:3]] == [*told, "note 29"]
    assert len(last) <= 2 + 4


async def test_a_custom_policy_is_found_by_its_name_and_cannot_part_calls_from_results(
    opened: Opened,
) -> None:
    """MEM-17, MEM-08"""
    policy = MemoryPolicy(custom=f"{__name__}:newest_only")
    async with opened(looks, memory=policy) as (_, hands, talker, run_id):
        await steps(hands, run_id, 3)
    assert [one.role for one in talker.requests[-1].messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("reference", "told"),
    [("failing", "out of order"), ("missing", "cannot be loaded")],
)
async def test_a_memory_policy_that_fails_is_an_error_of_the_step(
    opened: Opened, reference: str, told: str
) -> None:
    """MEM-14"""
    policy = MemoryPolicy(custom=f"{__name__}:{reference}")
    stop = ErrorPolicy.stop_on_any_error()
    async with opened(looks, memory=policy, error_policy=stop) as (desk, hands, talker, run_id):
        await steps(hands, run_id, 1)
        result = (await desk.stored(run_id)).result()
    assert talker.requests == []
    assert result.steps[0].type is StepType.ERROR
    assert told in result.steps[0].errors[0].message
    assert "memory.custom" in result.steps[0].errors[0].message


async def test_a_run_cannot_name_code_that_the_workers_agent_does_not_name(opened: Opened) -> None:
    """MEM-17"""
    async with opened(looks) as (desk, hands, talker, _):
        foreign = MemoryPolicy(custom="os:getcwd")
        stop = ErrorPolicy.stop_on_any_error()
        run_id = await created(desk, Message.user("hello"), memory=foreign, error_policy=stop)
        await steps(hands, run_id, 1)
        result = (await desk.stored(run_id)).result()
    assert talker.requests == []
    assert "'os:getcwd'" in result.steps[0].errors[0].message


async def test_notes_are_looked_up_for_every_step_and_come_last(redis_url: str) -> None:
    """MEM-11: behind the conversation, so that the beginning of requests stays."""
    memory = KeywordMemory()
    await memory.add("hello means good day")
    talker = Talker(looks)
    agent = Agent("talker", model=talker, tools=[look_at], context=memory)
    async with bench(redis_url, agent) as desk:
        run_id = await desk.create()
        await steps(Hands(desk, agent), run_id, 2)
        stored = await desk.stored(run_id)
    for request in talker.requests:
        assert request.messages[-1] == Message.added(f"{CONTEXT}- hello means good day", "memory")
    assert [one.role for one in talker.requests[1].messages[:-1]] == ["user", "assistant", "tool"]
    assert all(CONTEXT not in one.text for one in stored.state.messages)


async def test_a_memory_that_fails_is_an_error_of_the_step(redis_url: str) -> None:
    """MEM-14"""

    class Away(KeywordMemory):
        async def get_context(self, query: str, max_tokens: int) -> str:
            raise ConnectionError("no route")

    talker = Talker(looks)
    stop = ErrorPolicy.stop_on_any_error()
    agent = Agent("talker", model=talker, tools=[look_at], context=Away(), error_policy=stop)
    async with bench(redis_url, agent) as desk:
        run_id = await desk.create()
        await steps(Hands(desk, agent), run_id, 1)
        result = (await desk.stored(run_id)).result()
    assert talker.requests == []
    assert result.status is RunStatus.ERROR
    (error,) = result.steps[0].errors
    assert error.message == "memory Away failed: ConnectionError: no route"


async def test_a_step_that_runs_out_of_time_behind_its_summary_pays_for_it(
    opened: Opened,
) -> None:
    """MEM-15"""
    policy = MemoryPolicy(summarize_after=4)
    asked = asyncio.Event()

    class Slow(Talker):
        async def generate(self, request: ModelRequest) -> LLMResponse:
            answer = await super().generate(request)
            if len(self.requests) == 3:
                asked.set()
                await asyncio.Event().wait()
            return answer

    async with opened(looks, memory=policy) as (desk, _, _, _):
        talker = Slow(looks)
        agent = Agent("talker", model=talker, tools=[look_at], memory=policy)
        hands = Hands(desk, agent)
        run_id = await created(desk, Message.user("hello"), model_attempts=1)
        await steps(hands, run_id, 2)
        work = asyncio.create_task(hands.step(run_id, 2))
        await asyncio.wait_for(asked.wait(), 30)
        work.cancel(TIME_IS_UP)
        await work
        result = (await desk.stored(run_id)).result()
    assert result.steps[2].errors[0].code == "TIMEOUT_ERROR"
    assert result.steps[2].usage is not None
    assert result.steps[2].usage.llm_calls == 1
    assert result.usage.llm_calls == 3


@pytest.mark.parametrize(("at", "summarizes"), [(2, 0), (3, 1), (4, 0), (5, 1)])
async def test_a_fork_and_a_restored_checkpoint_ask_what_the_run_asked(
    opened: Opened, redis_url: str, at: int, summarizes: int
) -> None:
    """MEM-07, CKPT-07: window and summary are part of the log."""
    policy = MemoryPolicy(summarize_after=6)
    async with opened(looks, memory=policy) as (_, hands, talker, run_id):
        await steps(hands, run_id, 10)
        asked, made = talker.requests[at].messages, len(talker.summaries)
        async with AsyncFleet(redis_url) as fleet:
            forked = await fleet.history.fork(run_id, at=at)
            checkpoint = await fleet.history.checkpoint(run_id, at=at)
            restored = await fleet.history.restore(checkpoint, hands.agent, run_id=str(uuid4()))
        for copied in (forked, restored):
            await steps(hands, copied, 1, start=at)
            assert shape(talker.requests[-1].messages) == shape(asked)
        assert len(talker.summaries) == made + 2 * summarizes


def shape(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return what was said; each summary has a number of its own."""
    return [(one.role.value, one.text.rstrip("0123456789")) for one in messages]
