"""Hand-offs as pure decisions: which call counts, what the next agent gets, whose a step is."""

from datetime import UTC, datetime, timedelta

from stepfleet.orchestrator import (
    Agent,
    AgentState,
    LoggedStep,
    StepResult,
    ToolCall,
    ToolCallRecord,
)
from stepfleet.orchestrator.agents.config import limits_of
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.fold import after_step, rebuild
from stepfleet.orchestrator.protocol.revision import (
    Transfer,
    agent_before,
    handed_over,
    overrides_of,
    too_late,
    transfer_in,
)
from stepfleet.orchestrator.records.memory_window import Window
from stepfleet.orchestrator.records.outcome import RunAnswer
from stepfleet.orchestrator.records.state import StateInfo
from stepfleet.orchestrator.records.steps import HandedOver, Progress, RunAgent, by_agents

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TARGETS = {"to_b": "b", "to_c": "c"}
A = Agent("a", model="openai:m", max_steps=5, budget_usd=1.0, memory={"trim_log": True}).config
B = Agent("b", model="openai:n", max_steps=50).config
STATE = AgentState(agent_id="r", info=StateInfo(id="r", started_at=NOW, updated_at=NOW))
CLAIM = Claim("r", 0, "t", NOW, STATE, A, config_digest=A.digest, overrides='{"model":"openai:x"}')


def called(name: str, error: str | None = None) -> ToolCall:
    return ToolCall(id=name, name=name, arguments={"reason": "r" * 2000}, error=error)


def record(call: ToolCall, *, is_error: bool = False) -> ToolCallRecord:
    return ToolCallRecord(
        tool_name=call.name,
        call_id=call.id,
        arguments=call.arguments,
        is_error=is_error,
        timestamp=NOW,
    )


def step(number: int, made: HandedOver | None = None) -> LoggedStep:
    result = StepResult(step=number, started_at=NOW + timedelta(seconds=number))
    return LoggedStep(result=result, handoff=made)


def over(by: str, to: str, *, trims: bool = False) -> HandedOver:
    return HandedOver(by=RunAgent(name=by, config=f"{by}1"), to=RunAgent(name=to), trims=trims)


def test_the_first_readable_transfer_of_a_response_counts() -> None:
    calls = [called("look"), called("to_c", "no JSON"), called("to_b"), called("to_c")]
    assert transfer_in(calls, TARGETS) == Transfer(2, "b", (3,))
    assert transfer_in(calls[:2], TARGETS) is None
    late = too_late(calls[3], "b", NOW)
    assert (late.is_error, late.error and late.error.code) == (True, "NOT_EXECUTED")


def test_only_a_call_that_was_made_hands_over_and_the_limits_stay() -> None:
    call = called("to_b")
    transfer = Transfer(0, "b", target=B)
    assert handed_over(CLAIM, transfer, record(call, is_error=True)) is None
    assert handed_over(CLAIM, transfer, None) is None
    assert handed_over(CLAIM, Transfer(0, "b"), record(call)) is None
    made = handed_over(CLAIM, transfer, record(call))
    assert made is not None
    assert made.by == RunAgent(name="a", config=A.digest, overrides={"model": "openai:x"})
    assert (made.to.name, made.to.config) == ("b", B.digest)
    assert made.to.overrides == {"max_steps": 5, "budget_usd": 1.0}
    assert B.with_overrides(made.to.overrides).model == "openai:n"
    assert (len(made.reason), made.trims) == (1000, True)


def test_a_step_belongs_to_the_agent_before_the_next_hand_off() -> None:
    log = [step(1), step(2, over("a", "b")), step(3), step(4, over("b", "a")), step(5)]
    whose = [agent_before(log, at) for at in range(6)]
    assert [one and one.config for one in whose] == ["a1", "a1", "b1", "b1", None, None]
    steps, found = by_agents(log)
    assert [one.agent for one in steps] == ["a", "a", "b", "b", "a"]
    assert [(one.step, one.by, one.to) for one in found] == [(2, "a", "b"), (4, "b", "a")]
    assert by_agents([step(1)]) == ((step(1).result,), ())
    back = overrides_of(RunAgent(name="a", overrides={"model": "m", "max_steps": 1}), A)
    assert (back["model"], back["max_steps"], set(back)) == ("m", 5, {"model", *limits_of(A)})


def test_reasoning_stays_behind_and_the_runs_own_state_goes_on() -> None:
    progress = Progress(
        strategy_state={"plan": 1}, custom_state={"cart": 2}, answer=RunAnswer(text="begun")
    )
    before = STATE.model_copy(update={"window": Window(since=3, summary=2, limit=9)})
    result = StepResult(step=1, started_at=NOW)
    kept = after_step(before, result, (), NOW, progress)
    assert kept.strategy_state
    assert kept.answer
    after = after_step(before, result, (), NOW, progress, None, over("a", "b"))
    assert (after.strategy_state, after.answer, after.window) == ({}, None, None)
    assert (after.custom_state, after.step_count) == ({"cart": 2}, 1)
    trimmed = after_step(before, result, (), NOW, progress, None, over("a", "b", trims=True))
    assert trimmed.window == Window(since=3, summary=2, trimmed=True)
    again = after_step(trimmed, result, (), NOW, None, None, over("b", "c"))
    assert again.window == trimmed.window
    logged = LoggedStep(result=result, progress=progress, handoff=over("a", "b"))
    assert rebuild(STATE, [logged]).strategy_state == {}
