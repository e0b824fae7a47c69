"""Attempts at steps as a worker sees them: made by one call each."""

from datetime import datetime, timedelta
from typing import Any

from support.runs.agent_records import START, a_state, a_step, an_info

from stepfleet.orchestrator import AgentConfig, LLMResponse, LoggedStep, ModelRequest, UsageStats
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.worker.telemetry.observations import (
    ModelCallObservation,
    StepObservation,
    ToolCallObservation,
    nanoseconds,
)

RUN = "6ba7b810-9dad-41d1-80b4-00c04fd430c8"
BEGAN = nanoseconds(START)
SECOND = 1_000_000_000


def later(seconds: float) -> datetime:
    """Return a time so many seconds after the run's start."""
    return START + timedelta(seconds=seconds)


def a_claim(**fields: Any) -> Claim:
    """Return the claim of a run's first step."""
    state = a_state(info=an_info(id=RUN, execution_started_at=START), agent_id=RUN)
    given = {
        "run_id": RUN,
        "step": 0,
        "token": "t",
        "now": START,
        "state": state,
        "config": AgentConfig(name="clerk", model="openai:gpt"),
    }
    return Claim(**{**given, **fields})


def a_verdict(move: Move = Move.CONTINUE, *, logged: bool = True, **fields: Any) -> Verdict:
    """Return a verdict on the first step; `logged` tells whether a step came of it."""
    step = LoggedStep(result=a_step(1, cost_usd=0.5)) if logged else None
    given = {"move": move, "state": a_claim().state, "logged": step}
    return Verdict(**{**given, **fields})


def a_model_call(**fields: Any) -> ModelCallObservation:
    """Return a call that answered within a second."""
    given = {
        "span_id": 11,
        "began": BEGAN,
        "ended": BEGAN + SECOND,
        "request": ModelRequest(model="openai:gpt", messages=()),
        "response": LLMResponse(
            content="yes", model="gpt-1", usage=UsageStats(prompt_tokens=7, completion_tokens=2)
        ),
    }
    return ModelCallObservation(**{**given, **fields})


def a_tool_call(**fields: Any) -> ToolCallObservation:
    """Return a call of `add` that took a second, after the model's."""
    given = {
        "span_id": 12,
        "began": BEGAN + SECOND,
        "ended": BEGAN + 2 * SECOND,
        "name": "add",
        "call_id": "c1",
    }
    return ToolCallObservation(**{**given, **fields})


def an_attempt(
    verdict: Verdict,
    *calls: ModelCallObservation | ToolCallObservation,
    applied: bool = True,
    **claimed: Any,
) -> StepObservation:
    """Return an attempt of three seconds that came to `verdict`."""
    return StepObservation(a_claim(**claimed), verdict, calls, BEGAN, BEGAN + 3 * SECOND, applied)
