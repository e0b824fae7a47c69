"""What becomes of a run after an attempt at a step: the moves, and what each writes."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stepfleet.orchestrator import (
    AgentConfig,
    AgentState,
    ErrorInfo,
    ErrorPolicy,
    ErrorType,
    LLMResponse,
    Message,
    ToolCall,
    ToolCallRecord,
    UsageStats,
)
from stepfleet.orchestrator.agents.agent import criteria_of
from stepfleet.orchestrator.protocol.attempt import (
    Answered,
    Attempt,
    Failed,
    Interrupted,
    Interruption,
    Parked,
    Prevented,
    Span,
    Wait,
)
from stepfleet.orchestrator.protocol.claim import Claim, Journal, Outage
from stepfleet.orchestrator.protocol.verdict import Facts, Move, Verdict, backoff, decide
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.run.results import LostKind
from stepfleet.orchestrator.records.state import StateInfo
from stepfleet.orchestrator.records.steps import FinishReason, Progress, StepType
from stepfleet.orchestrator.records.usage import Spent

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SPAN = Span(NOW, 2.0)
USAGE = UsageStats(prompt_tokens=10, completion_tokens=5, total_tokens=15)
CALL = ToolCall(id="c1", name="look")
TEXT = LLMResponse(content="done", usage=USAGE, finish_reason=FinishReason.STOP)
ASKS = LLMResponse(tool_calls=(CALL,), usage=USAGE, finish_reason=FinishReason.TOOL_CALLS)
PAUSE = TEXT.model_copy(update={"finish_reason": FinishReason.PAUSE})
BROKEN = ErrorInfo(type=ErrorType.TOOL, code="TOOL_EXECUTION_ERROR", message="broken")
OUT = ErrorInfo(type=ErrorType.MODEL, code=ModelErrorCode.CIRCUIT_OPEN, message="out")
SERVER = ErrorInfo(type=ErrorType.MODEL, code="OPENAI_ERROR", message="500", retryable=True)
TIMEOUT = ErrorInfo(type=ErrorType.TIMEOUT, code="TIMEOUT_ERROR", message="late", retryable=True)
KEY = ErrorInfo(type=ErrorType.MODEL, code=ModelErrorCode.INVALID_API_KEY, message="401")
SPENT = Spent(15, 0.5, model="m")


def claim(**config: Any) -> Claim:
    info = StateInfo(id="r", started_at=NOW, updated_at=NOW)
    made = AgentConfig.model_validate({"name": "a", "model": "openai:m", "max_steps": 3, **config})
    state = AgentState(agent_id="a", info=info, messages=(Message.user("Hi"),))
    return Claim("r", 0, "token", NOW, state, made)


def at_step(step: int, **config: Any) -> Claim:
    """The claim of a run that has made so many steps."""
    found = claim(**config)
    state = found.state.model_copy(update={"step_count": step, "session_steps": step})
    return replace(found, step=step, state=state)


def begun(seconds: float, **config: Any) -> Claim:
    """The claim of a run that began so long ago."""
    found = claim(**config)
    began = NOW - timedelta(seconds=seconds)
    info = found.state.info.model_copy(update={"execution_started_at": began})
    return replace(found, state=found.state.model_copy(update={"info": info}))


def cancelled(found: Claim) -> Claim:
    state = found.state.model_copy(update={"stop_requested": "a cancel was requested"})
    return replace(found, state=state)


def record(error: ErrorInfo | None = None) -> ToolCallRecord:
    return ToolCallRecord(
        tool_name="look",
        call_id="c1",
        timestamp=NOW,
        result=None if error else 1,
        is_error=error is not None,
        error=error,
    )


def used(error: ErrorInfo | None = None, **fields: Any) -> Answered:
    return Answered(SPAN, ASKS, (record(error),), ("text",), 0.5, **fields)


def interrupted(by: Interruption, response: LLMResponse | None = None, **more: Any) -> Interrupted:
    calls = (response and response.tool_calls) or ()
    records, texts = tuple(record(BROKEN) for _ in calls), tuple("not run" for _ in calls)
    answer = Answered(SPAN, response, records, texts, 0.5) if response else None
    return Interrupted(SPAN, by, answer, **more)


def failed(error: ErrorInfo = SERVER, **fields: Any) -> Failed:
    return Failed(SPAN, error, **{"transient": True, **fields})


def parked(found: Claim) -> tuple[Claim, Attempt]:
    answer = interrupted(Interruption.CANCELLED, ASKS).answer
    assert answer is not None
    return found, Parked(SPAN, (Wait(0, "gpu", "look"),), answer)


@dataclass(frozen=True)
class Row:
    claim: Claim
    attempt: Attempt
    move: Move
    says: dict[str, Any] = field(default_factory=dict)


WAITED_OUT = Outage(NOW - timedelta(days=2), ("m",))
PRICED = replace(claim(), journal=Journal(response=TEXT))
HANDED_BACK, LEASE_LOST = Interruption.HANDED_BACK, Interruption.LEASE_LOST
STOPPED = {"stop": StopReason.USER_REQUESTED, "logged": None}
CODED = {"code": SERVER.code}
IN_VAIN = {"lost": LostKind.FAILED, **CODED}
ROWS = {
    # The model answered.
    "text ends the run": Row(
        claim(),
        Answered(SPAN, TEXT),
        Move.FINISH,
        {"stop": StopReason.COMPLETED, "logged": StepType.FINAL_RESPONSE, "late": True},
    ),
    "text at the last step is an answer too": Row(
        at_step(2), Answered(SPAN, TEXT), Move.FINISH, {"stop": StopReason.COMPLETED}
    ),
    "a call of a tool goes on": Row(
        claim(), used(), Move.CONTINUE, {"logged": StepType.TOOL_EXECUTION, "stop": None}
    ),
    "a call at the last step is stopped": Row(
        at_step(2), used(), Move.FINISH, {"stop": StopReason.STEPS_LIMIT}
    ),
    "a call above the budget is stopped": Row(
        claim(budget_usd=0.4), used(), Move.FINISH, {"stop": StopReason.GUARD}
    ),
    "a call beyond the run's tokens is stopped": Row(
        claim(token_limit=15), used(), Move.FINISH, {"stop": StopReason.TOKEN_LIMIT}
    ),
    "a call behind the time limit is stopped": Row(
        claim(cumulative_timeout=2), used(), Move.FINISH, {"stop": StopReason.TIME_LIMIT}
    ),
    "a turn among the service's own tools goes on": Row(
        claim(), Answered(SPAN, PAUSE), Move.CONTINUE, {"logged": StepType.TOOL_EXECUTION}
    ),
    "a tool that failed is a failed step, which the model reads": Row(
        claim(error_policy=ErrorPolicy.retry_all()),
        used(BROKEN),
        Move.CONTINUE,
        {"logged": StepType.ERROR, "failure": BROKEN},
    ),
    "a tool that failed too often ends the run": Row(
        claim(error_policy=ErrorPolicy.retry_all(1)),
        used(BROKEN),
        Move.FINISH,
        {"stop": StopReason.RETRY_LIMIT, "failure": BROKEN},
    ),
    "an error that the reasoner answered is none": Row(
        claim(), used(BROKEN, handled=frozenset({0})), Move.CONTINUE, {"failure": None}
    ),
    "what a reasoner could not read is an error": Row(
        claim(error_policy=ErrorPolicy.retry_all()),
        Answered(SPAN, TEXT, progress=Progress(error=BROKEN)),
        Move.CONTINUE,
        {"logged": StepType.ERROR, "failure": BROKEN},
    ),
    "a cancel amid the step ends the run behind it": Row(
        cancelled(claim()),
        used(),
        Move.FINISH,
        {"stop": StopReason.USER_REQUESTED, "logged": StepType.TOOL_EXECUTION},
    ),
    # The call failed, and may be repeated.
    "a server's error is tried again": Row(
        claim(),
        failed(),
        Move.RETRY,
        {"attempt": True, "delay": 0.75, "lost": LostKind.DEFERRED, "ambiguous": False} | CODED,
    ),
    "later with each failure": Row(
        replace(claim(model_attempts=5), attempts=2), failed(), Move.RETRY, {"delay": 6.75}
    ),
    "not before the server's wish": Row(
        claim(), failed(retry_after=30.0), Move.RETRY, {"delay": 31.5, "retry_after": 30.0}
    ),
    "not behind the run's own time limit": Row(
        begun(40, time_limit=60.0), failed(retry_after=3600.0), Move.RETRY, {"delay": 20.0}
    ),
    "nor behind that of a refused one": Row(
        begun(40, time_limit=60.0),
        failed(limited=True, refused="m", retry_after=3600.0),
        Move.RETRY,
        {"delay": 20.0, "retry_after": 3600.0},
    ),
    "when it ends the run, by whole seconds": Row(
        begun(1, time_limit=1.5), failed(retry_after=3600.0), Move.RETRY, {"delay": 1.0}
    ),
    "at once behind it": Row(
        begun(90, time_limit=60.0), failed(retry_after=3600.0), Move.RETRY, {"delay": 0.1}
    ),
    "however long without one": Row(
        begun(90, time_limit=None), failed(retry_after=3600.0), Move.RETRY, {"delay": 3780.0}
    ),
    "nor does a wait end a limit of workers' time": Row(
        begun(90, cumulative_timeout=60.0), failed(retry_after=90.0), Move.RETRY, {"delay": 94.5}
    ),
    "a timeout may have been paid for": Row(
        claim(), failed(TIMEOUT), Move.RETRY, {"ambiguous": True}
    ),
    "unless the ledger has it": Row(
        claim(), failed(TIMEOUT, entered=True), Move.RETRY, {"ambiguous": False}
    ),
    "a paid failure keeps its price": Row(
        claim(), failed(spent=SPENT), Move.RETRY, {"ambiguous": True, "cost": 0.5}
    ),
    "a refusal for now costs no attempt": Row(
        claim(),
        failed(limited=True, refused="m"),
        Move.RETRY,
        {"attempt": False, "limited": True, "refused": "m"},
    ),
    "however many attempts have failed": Row(
        replace(claim(model_attempts=3), attempts=9),
        failed(limited=True, unsent=True),
        Move.RETRY,
        {"attempt": False, "unsent": True},
    ),
    "the last attempt fails the step": Row(
        replace(claim(model_attempts=3), attempts=2),
        failed(),
        Move.FINISH,
        {"stop": StopReason.ERROR, "failure": SERVER, "lost": None},
    ),
    "and says what may have been paid": Row(
        replace(claim(model_attempts=3), attempts=2), failed(spent=SPENT), Move.FINISH, IN_VAIN
    ),
    "a policy's retry is a step of its own": Row(
        claim(model_attempts=1, error_policy=ErrorPolicy.retry_all()),
        failed(retry_after=8.0),
        Move.CONTINUE,
        {"delay": 8.4, "logged": StepType.ERROR},
    ),
    "which comes no later than the run's time limit": Row(
        begun(40, time_limit=60.0, model_attempts=1, error_policy=ErrorPolicy.retry_all()),
        failed(retry_after=3600.0),
        Move.CONTINUE,
        {"delay": 20.0},
    ),
    "a failure for good is not tried again": Row(
        claim(),
        failed(KEY, transient=False),
        Move.FINISH,
        {"stop": StopReason.ERROR, "failure": KEY, "attempt": False},
    ),
    "a failure behind a journaled answer has nothing in vain": Row(
        PRICED, failed(TIMEOUT, transient=False), Move.FINISH, {"lost": None}
    ),
    "a cancelled run is not tried again": Row(
        cancelled(claim()), failed(), Move.FINISH, {**STOPPED, "lost": LostKind.DEFERRED}
    ),
    # A service is out.
    "a service that is out is waited for": Row(
        claim(),
        failed(OUT, outage=("m",)),
        Move.RETRY,
        {"outage": ("m",), "attempt": False, "lost": None, "delay": 2700.0},
    ),
    "a call that found it out is listed": Row(
        claim(), failed(outage=("m",)), Move.RETRY, {"lost": LostKind.DEFERRED, **CODED}
    ),
    "not for ever": Row(
        replace(claim(), outage=WAITED_OUT),
        failed(OUT, outage=("m",)),
        Move.FINISH,
        {"stop": StopReason.ERROR, "logged": StepType.ERROR},
    ),
    "nor for a cancelled run": Row(
        cancelled(claim()), failed(OUT, outage=("m",)), Move.FINISH, STOPPED
    ),
    # The attempt was prevented or broken off.
    "what a criterion forbids is not done": Row(
        at_step(3),
        Prevented(SPAN, criteria_of(at_step(3).config).evaluate(at_step(3).state)),
        Move.FINISH,
        {"stop": StopReason.STEPS_LIMIT, "logged": None, "lost": None},
    ),
    "a worker that stops puts the step back": Row(
        claim(), interrupted(HANDED_BACK), Move.RELEASE, {"ambiguous": True, "logged": None}
    ),
    "with nothing paid where no call was made": Row(
        claim(), interrupted(HANDED_BACK, unsent=True), Move.RELEASE, {"ambiguous": False}
    ),
    "nor where the model has answered": Row(
        claim(), interrupted(HANDED_BACK, ASKS), Move.RELEASE, {"ambiguous": False}
    ),
    "who lost the lease writes nothing": Row(
        claim(), interrupted(LEASE_LOST), Move.RELEASE, {"logged": None, "stop": None}
    ),
    "a cancel before the answer ends the run without the step": Row(
        cancelled(claim()),
        interrupted(Interruption.CANCELLED),
        Move.FINISH,
        {**STOPPED, "lost": LostKind.INTERRUPTED, "ambiguous": True},
    ),
    "a cancel behind it keeps the answer": Row(
        cancelled(claim()),
        interrupted(Interruption.CANCELLED, ASKS),
        Move.FINISH,
        {"stop": StopReason.USER_REQUESTED, "logged": StepType.ERROR},
    ),
    "a time limit of the task fails its calls": Row(
        claim(error_policy=ErrorPolicy.retry_all()),
        interrupted(Interruption.TIMED_OUT, ASKS),
        Move.CONTINUE,
        {"logged": StepType.ERROR},
    ),
    # The step waits for calls that are tasks of their own.
    "a step that waits keeps what it has paid": Row(
        *parked(claim()),
        Move.WAIT,
        {"lost": LostKind.INTERRUPTED, "cost": 0.5, "waits": (0,), "logged": None, "late": True},
    ),
    "a cancelled run waits for none": Row(
        *parked(cancelled(claim())), Move.FINISH, {"stop": StopReason.USER_REQUESTED}
    ),
}


def told(verdict: Verdict) -> dict[str, Any]:
    """Return what a row may say of a verdict."""
    logged, lost = verdict.logged, verdict.lost
    return {
        "stop": verdict.stop_reason,
        "logged": logged.result.type if logged else None,
        "late": verdict.dropped is not None and verdict.dropped.kind is LostKind.LATE,
        "lost": lost.kind if lost else None,
        "ambiguous": lost is not None and lost.ambiguous,
        "code": lost.code if lost else None,
        "cost": lost.cost_usd if lost else None,
        "failure": verdict.failure,
        "delay": pytest.approx(verdict.delay),
        "attempt": verdict.attempt,
        "limited": verdict.limited,
        "refused": verdict.refused,
        "unsent": verdict.unsent,
        "retry_after": verdict.retry_after,
        "outage": verdict.outage.circuits if verdict.outage else None,
        "waits": tuple(one.index for one in verdict.waiting.calls) if verdict.waiting else None,
    }


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_verdict(row: Row) -> None:
    verdict = decide(row.claim, row.attempt, criteria_of(row.claim.config), Facts(NOW))
    found = told(verdict)
    assert verdict.move is row.move
    assert {name: found[name] for name in row.says} == row.says
    is_step = verdict.logged is not None
    assert verdict.state.step_count == row.claim.state.step_count + is_step
    assert verdict.state.info.cumulative_execution_seconds == (2.0 if is_step else 0.0)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_only_an_end_has_a_stop_reason_and_only_a_wait_a_delay(row: Row) -> None:
    verdict = decide(row.claim, row.attempt, criteria_of(row.claim.config), Facts(NOW))
    assert (verdict.stop_reason is not None) is (verdict.move is Move.FINISH)
    assert verdict.delay == 0 or verdict.move in (Move.RETRY, Move.CONTINUE)
    assert (verdict.waiting is not None) is (verdict.move is Move.WAIT)
    assert not (verdict.attempt and verdict.move is not Move.RETRY)


@pytest.mark.parametrize(
    ("failures", "wish", "jitter", "seconds"),
    [
        (1, None, 0.0, 0.5),
        (1, None, 1.0, 1.0),
        (3, None, 1.0, 9.0),
        (9, None, 1.0, 120.0),
        (10**9, None, 0.0, 60.0),
        (1, 10.0, 1.0, 11.0),
        (9, 10.0, 0.0, 60.0),
        (1, 10.0**300, 0.0, 3600.0),
    ],
)
def test_how_long_a_failed_call_waits(
    failures: int, wish: float | None, jitter: float, seconds: float
) -> None:
    assert backoff(failures, retry_after=wish, jitter=jitter) == pytest.approx(seconds)
