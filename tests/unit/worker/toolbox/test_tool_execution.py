import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from support.deadlines import wait_until

from stepfleet.orchestrator import (
    CallStatus,
    ErrorType,
    ToolCall,
    ToolCallRecord,
    current_invocation,
    tool,
)
from stepfleet.orchestrator.errors import RateLimitError, ToolExecutionError
from stepfleet.orchestrator.tools import ToolInvocation, ToolRegistry, WithMedia, registry_of
from stepfleet.worker.toolbox import LocalToolbox, ToolThreads, execute_at_once, execute_call

NOW = datetime(2024, 5, 1, 12, tzinfo=UTC)


@pytest.fixture
def threads() -> Iterator[ToolThreads]:
    made = ToolThreads(4)
    yield made
    made.close()


async def execute(
    threads: ToolThreads, function: Any, attempt: int = 1, /, **arguments: Any
) -> ToolCallRecord:
    registry = registry_of([function])
    name = next(iter(registry)).name
    call = ToolCall(id="c1", name=name, arguments=arguments)
    return await call_of(threads, registry, call, attempt)


def invocation_of(call: ToolCall, attempt: int = 1) -> ToolInvocation:
    return ToolInvocation.of(call, run_id="r", execution=1, step=1, index=0, attempt=attempt)


async def call_of(
    threads: ToolThreads,
    registry: ToolRegistry,
    call: ToolCall,
    attempt: int = 1,
    default_timeout: float = 60,
) -> ToolCallRecord:
    return await execute_call(
        call,
        registry,
        invocation_of(call, attempt),
        clock=lambda: NOW,
        limiter=threads,
        default_timeout=default_timeout,
    )


@tool
def add(left: int, right: int = 1) -> int:
    """Add."""
    return left + right


@tool
async def add_later(left: int) -> dict[str, int]:
    """Add."""
    await asyncio.sleep(0)
    return {"sum": left + 1}


async def test_a_call_is_executed_and_recorded(threads: ToolThreads) -> None:
    """TOOL-09, TOOL-12: success, result and error in one record."""
    record = await execute(threads, add, left=1, right=2)
    assert record.model_copy(update={"duration_ms": 0.0}) == ToolCallRecord(
        tool_name="add",
        call_id="c1",
        arguments={"left": 1, "right": 2},
        result=3,
        duration_ms=0.0,
        timestamp=NOW,
    )


async def test_coroutine_functions_are_executed_too(threads: ToolThreads) -> None:
    """TOOL-01"""
    assert (await execute(threads, add_later, left=1)).result == {"sum": 2}


async def test_a_malformed_call_is_answered_with_its_error(threads: ToolThreads) -> None:
    """TOOL-07: it is never run."""
    call = ToolCall(id="c1", name="add", error="the arguments are no JSON")
    record = await call_of(threads, registry_of([add]), call)
    assert record.error is not None
    assert (record.is_error, record.error.code) == (True, "INVALID_FUNCTION_CALL")
    assert record.error.message == "the arguments are no JSON"


async def test_an_unknown_tool_gives_an_error_that_names_it(threads: ToolThreads) -> None:
    """TOOL-05"""
    record = await call_of(threads, registry_of([add]), ToolCall(id="c1", name="ad"))
    assert record.error is not None
    assert (record.is_error, record.error.code, record.error.type) == (
        True,
        "TOOL_NOT_FOUND",
        ErrorType.TOOL,
    )
    assert record.error.message == "tool 'ad' does not exist; did you mean 'add'?"
    assert (record.error.tool_name, record.error.call_id) == ("ad", "c1")


async def test_wrong_arguments_are_an_error_without_running_the_tool(threads: ToolThreads) -> None:
    """TOOL-10: the side-effect counter stays 0."""
    runs: list[int] = []

    @tool
    def count(number: int) -> None:
        runs.append(number)

    for arguments in ({}, {"number": "1"}, {"number": 1, "other": 2}):
        record = await execute(threads, count, **arguments)
        assert record.error is not None
        assert (record.error.code, record.error.retryable) == ("VALIDATION_ERROR", True)
    assert runs == []


def raises(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no such city"), "ValueError: no such city"),
        (KeyError("x"), "KeyError: 'x'"),
        (RuntimeError(), "RuntimeError"),
        (MuteError(), "MuteError: (its message cannot be shown)"),
        (TimeoutError("socket"), "TimeoutError: socket"),
        (ValueError("\ud800"), "ValueError: \\ud800"),
        (SystemExit(3), "RuntimeError: ended with SystemExit: 3"),
        (GeneratorExit("x"), "RuntimeError: ended with GeneratorExit: x"),
        (ToolExecutionError("the shop is closed"), "the shop is closed"),
    ],
)
@pytest.mark.parametrize("thread", [True, False], ids=["thread", "inline"])
async def test_an_exception_becomes_an_error_with_type_and_message(
    threads: ToolThreads, error: BaseException, message: str, thread: bool
) -> None:
    """TOOL-11: whatever a tool raises, in a thread or in the loop."""
    record = await execute(threads, tool(thread=thread)(raises(error)))
    assert record.error is not None
    assert record.error.message == message
    assert (record.error.type, record.error.code) == (ErrorType.TOOL, "TOOL_EXECUTION_ERROR")


class FatalError(BaseException):
    """What no `except Exception` catches."""


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit("x"), FatalError("x")], ids=repr)
async def test_what_would_end_loop_or_step_is_an_error_of_a_coroutine_s_call_alone(
    threads: ToolThreads, error: BaseException
) -> None:
    """TOOL-11: a step that a GeneratorExit ends is not committed, and is begun again for ever."""

    async def fail() -> None:
        raise error

    record = await execute(threads, tool(fail))
    assert record.error is not None
    assert record.error.message == f"RuntimeError: ended with {type(error).__name__}: {error}"


async def test_an_exception_that_cannot_travel_through_a_future_is_an_error_too(
    threads: ToolThreads,
) -> None:
    """TOOL-11"""
    record = await execute(threads, tool(raises(StopIteration(1))))
    assert record.error is not None
    assert record.error.message == "RuntimeError: ended with StopIteration: 1"


async def test_a_failure_of_the_project_s_own_kind_keeps_its_type(threads: ToolThreads) -> None:
    """TOOL-11, TOOL-12"""
    record = await execute(threads, tool(raises(RateLimitError("slow down"))))
    assert record.error is not None
    assert (record.error.type, record.error.retryable) == (ErrorType.RATE_LIMIT, True)


async def test_a_long_message_is_cut_with_its_length_told(threads: ToolThreads) -> None:
    """TOOL-11: bounded."""
    record = await execute(threads, tool(raises(ValueError("x" * 5000))))
    assert record.error is not None
    assert record.error.message.endswith("x ... (3012 more characters)")


async def test_an_iterator_s_values_are_made_in_a_thread_and_no_more_of_them_than_fit(
    threads: ToolThreads,
) -> None:
    """TOOL-09: one without an end froze the loop and took all memory."""
    made: list[int] = []
    where: set[int] = set()

    def one(number: int) -> str:
        where.add(threading.get_ident())
        made.append(number)
        return "x" * 1000

    @tool
    def numbers(most: int) -> Iterator[str]:
        return map(one, range(most))

    few = await execute(threads, numbers, most=3)
    assert few.result == ["x" * 1000] * 3
    many = await execute(threads, numbers, most=1_000_000)
    assert many.error is not None
    assert "larger than the limit" in many.error.message
    assert len(made) < 3 + 300
    assert threading.get_ident() not in where


async def test_an_iterator_has_the_tool_s_time(threads: ToolThreads) -> None:
    """TOOL-08"""
    over = threading.Event()

    @tool(timeout=0.05)
    def hangs() -> Iterator[bool]:
        return (over.wait(60) for _ in range(1))

    record = await execute(threads, hangs)
    over.set()
    assert record.error is not None
    assert record.error.type is ErrorType.TIMEOUT


async def test_a_result_that_cannot_be_stored_is_an_error(threads: ToolThreads) -> None:
    """TOOL-09: never an exception, never cut silently."""

    @tool
    def binary() -> bytes:
        return b"x"

    @tool
    def huge() -> str:
        return "x" * 300_000

    for function, says in ((binary, "is bytes"), (huge, "larger than the limit of 262144 bytes")):
        record = await execute(threads, function)
        assert record.error is not None
        assert says in record.error.message
        assert record.result is None


@pytest.mark.parametrize("media", ["text", {"image": {}}, ["text"], 5])
async def test_media_that_are_no_blocks_are_an_error_of_the_call(
    threads: ToolThreads, media: Any
) -> None:
    """TOOL-09: a record with them could not be read again."""

    @tool
    def shows() -> WithMedia:
        return WithMedia("seen", media)

    record = await execute(threads, shows)
    assert record.error is not None
    assert record.error.message == "the tool's media must be a list of content blocks"


async def test_the_duration_is_measured_for_failures_too(
    threads: ToolThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TOOL-13: 200 ms, whether the tool succeeds or fails, though the clock on the wall stands."""
    monkeypatch.setattr(time, "time", lambda: 0.0)

    @tool
    def sleeps(fail: bool) -> None:
        time.sleep(0.2)  # a slow tool: its time is what is measured
        if fail:
            raise ValueError("no")

    for fail in (False, True):
        record = await execute(threads, sleeps, fail=fail)
        assert record.is_error is fail
        assert record.duration_ms is not None
        assert 199 <= record.duration_ms < 60_000
    unknown = await call_of(threads, registry_of([]), ToolCall(id="c", name="x"))
    assert unknown.duration_ms is not None


@pytest.mark.parametrize("thread", [True, False], ids=["thread", "loop"])
async def test_a_hanging_tool_ends_as_a_timeout(threads: ToolThreads, thread: bool) -> None:
    """TOOL-16: error type timeout, after the tool's own timeout."""
    release = threading.Event()

    @tool(timeout=0.1)
    def hang() -> None:
        release.wait(60)

    @tool(timeout=0.1)
    async def hang_later() -> None:
        await asyncio.Event().wait()

    try:
        record = await execute(threads, hang if thread else hang_later)
    finally:
        release.set()
    assert record.error is not None
    assert (record.error.type, record.error.code) == (ErrorType.TIMEOUT, "TIMEOUT_ERROR")
    assert "took longer than its timeout of 0.1 s" in record.error.message
    assert record.duration_ms is not None
    assert 100 <= record.duration_ms < 30_000


async def test_a_tool_without_timeout_has_the_default_one(threads: ToolThreads) -> None:
    """TOOL-16"""

    @tool
    async def hang() -> None:
        await asyncio.Event().wait()

    call = ToolCall(id="c1", name="hang")
    record = await call_of(threads, registry_of([hang]), call, default_timeout=0.05)
    assert record.error is not None
    assert record.error.message == "tool 'hang' took longer than its timeout of 0.05 s"


async def test_a_tool_that_ignores_its_cancellation_cannot_hold_the_run(
    threads: ToolThreads,
) -> None:
    """TOOL-16: the record comes after a short grace."""
    ended = asyncio.Event()

    @tool(timeout=0.05)
    async def stubborn() -> None:
        while not ended.is_set():
            try:
                await ended.wait()
            except asyncio.CancelledError:
                continue

    record = await asyncio.wait_for(execute(threads, stubborn), 60)
    ended.set()
    assert record.error is not None
    assert record.error.type is ErrorType.TIMEOUT


async def test_a_tool_that_cancels_itself_is_an_error_and_cancels_nobody(
    threads: ToolThreads,
) -> None:
    """TOOL-11"""

    @tool
    async def gives_up() -> None:
        raise asyncio.CancelledError

    record = await execute(threads, gives_up)
    assert record.error is not None
    assert record.error.message == "the tool cancelled itself"


async def test_cancelling_the_step_cancels_the_tool_and_passes_through(
    threads: ToolThreads,
) -> None:
    """TOOL-09: the one exception that leaves the executor."""
    started, cleaned = asyncio.Event(), asyncio.Event()

    @tool
    async def wait() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    task = asyncio.create_task(execute(threads, wait))
    await asyncio.wait_for(started.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned.is_set()


async def test_cancelling_the_step_leaves_a_thread_behind_and_counts_it(
    threads: ToolThreads,
) -> None:
    """TOOL-09: a thread cannot be killed."""
    started, release = threading.Event(), threading.Event()

    @tool
    def work() -> None:
        started.set()
        release.wait(60)

    task = asyncio.create_task(execute(threads, work))
    assert await asyncio.to_thread(started.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert threads.hung == 1
    release.set()
    wait_until(lambda: threads.hung == 0, within=60, what="the thread's end")


async def test_a_tool_reads_its_invocation_in_a_thread_and_in_the_loop(
    threads: ToolThreads,
) -> None:
    """TOOL-26: key, attempt and deadline are known inside; a second attempt is marked."""

    @tool(timeout=30)
    def who() -> ToolInvocation:
        return current_invocation()

    @tool(timeout=30, name="who")
    async def who_later() -> ToolInvocation:
        return current_invocation()

    for function in (who, who_later):
        record = await execute(threads, function, 2)
        assert record.repeated
        assert record.result == {
            "run_id": "r",
            "execution": 1,
            "step": 1,
            "index": 0,
            "call_id": "c1",
            "tool": "who",
            "idempotency_key": record.result["idempotency_key"],
            "attempt": 2,
            "deadline": "2024-05-01T12:00:30Z",
            "custom_state": {},
            "metadata": {},
            "batch_id": None,
            "line_id": None,
            "arguments": {},
        }
        assert len(record.result["idempotency_key"]) == 32


async def test_a_plain_function_runs_in_a_named_thread_unless_it_asks_for_the_loop(
    threads: ToolThreads,
) -> None:
    """TOOL-01: blocking tools do not stall other runs."""

    def where() -> str:
        return threading.current_thread().name

    assert (await execute(threads, tool(where))).result == "stepfleet-tool"
    here = threading.current_thread().name
    assert (await execute(threads, tool(thread=False)(where))).result == here


async def test_a_plain_function_may_return_a_coroutine(threads: ToolThreads) -> None:
    """TOOL-01: a function that hands on another one's coroutine."""

    async def later() -> int:
        return 5

    def now() -> Awaitable[int]:
        return later()

    assert (await execute(threads, tool(now))).result == 5


async def test_middle_failure_leaves_the_other_calls_of_a_parallel_turn_alone(
    threads: ToolThreads,
) -> None:
    """TOOL-15, ERR-24, TOOL-07: two successes are recorded beside one bad call."""
    registry = registry_of([add, add_later, tool(name="fail")(raises(ValueError("no")))])
    calls = [
        ToolCall(id="1", name="add", arguments={"left": 1}),
        ToolCall(id="2", name="fail"),
        ToolCall(id="3", name="add", error="bad arguments"),
        ToolCall(id="4", name="add_later", arguments={"left": 1}),
    ]

    async def one(call: ToolCall) -> ToolCallRecord:
        return await call_of(threads, registry, call)

    records = await execute_at_once(calls, one)
    assert [record.call_id for record in records] == ["1", "2", "3", "4"]
    assert [record.is_error for record in records] == [False, True, True, False]
    assert [record.result for record in records] == [2, None, None, {"sum": 2}]


def paid(invocation: ToolInvocation) -> str:
    return f"paid before with {invocation.idempotency_key}"


async def paid_later(invocation: ToolInvocation) -> str:
    return paid(invocation)


@pytest.mark.parametrize("hook", [paid, paid_later], ids=["plain", "coroutine"])
async def test_a_status_hook_tells_the_result_of_a_lost_call(hook: Any) -> None:
    """TOOL-26: the tool is not run again."""
    runs: list[int] = []

    @tool(status=hook)
    def pay(amount: int) -> None:
        runs.append(amount)

    call = ToolCall(id="c", name="pay", arguments={"amount": 5})
    invocation = invocation_of(call, attempt=2)
    record = await LocalToolbox(1).recall(call, pay, invocation, clock=lambda: NOW)
    assert isinstance(record, ToolCallRecord)
    assert record.result == f"paid before with {invocation.idempotency_key}"
    assert (record.repeated, runs) == (True, [])


def ignorant(invocation: ToolInvocation) -> None: ...


@pytest.mark.parametrize("hook", [None, ignorant], ids=["none", "ignorant"])
async def test_without_a_hook_or_its_knowledge_the_outcome_stays_unknown(hook: Any) -> None:
    """TOOL-26"""

    @tool(status=hook)
    def pay() -> str:
        return "paid again"

    call = ToolCall(id="c", name="pay")
    found = LocalToolbox(1).recall(call, pay, invocation_of(call, 2), clock=lambda: NOW)
    assert await found is CallStatus.UNKNOWN
