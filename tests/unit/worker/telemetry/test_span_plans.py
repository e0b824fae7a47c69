"""Which spans an attempt amounts to."""

from dataclasses import replace

from support.runs.agent_records import START, a_call, a_step, an_error
from support.runs.seen_steps import (
    BEGAN,
    RUN,
    SECOND,
    a_claim,
    a_model_call,
    a_tool_call,
    a_verdict,
    an_attempt,
    later,
)

from stepfleet.orchestrator import ErrorType, LoggedStep, StopReason, ToolCall
from stepfleet.orchestrator.protocol.claim import Journal, Refused, Work
from stepfleet.orchestrator.protocol.verdict import Move
from stepfleet.orchestrator.protocol.waiting import TakenCall
from stepfleet.orchestrator.records.calls.answers import Decision
from stepfleet.worker.telemetry.observations import (
    CANCELLED,
    RefusalObservation,
    ToolTaskObservation,
)
from stepfleet.worker.telemetry.span_plans import (
    TAKEN_OVER,
    is_failure,
    run_span_id,
    spans_of,
    step_span_id,
)

PARENT = "6ba7b811-9dad-41d1-80b4-00c04fd430c8"


def test_a_step_stands_below_its_run_and_its_calls_below_it() -> None:
    """OBS-01"""
    model, tool, step = spans_of(an_attempt(a_verdict(), a_model_call(), a_tool_call()))
    assert [one.name for one in (model, tool, step)] == ["llm_generate", "tool_execution", "step_1"]
    assert model.parent_id == tool.parent_id == step.span_id
    assert step.parent_id == run_span_id(RUN)
    assert (step.began, step.ended) == (BEGAN, BEGAN + 3 * SECOND)
    assert (model.is_call, tool.is_call) == (True, False)
    assert {one.attributes["stepfleet.run_id"] for one in (model, tool, step)} == {RUN}


def test_the_runs_own_span_comes_with_its_end() -> None:
    """OBS-01: from its first step to its last commit."""
    verdict = a_verdict(Move.FINISH, stop_reason=StopReason.COMPLETED)
    *_, run = spans_of(an_attempt(verdict, a_model_call(), now=later(5)))
    assert (run.name, run.span_id, run.parent_id) == ("agent_run", run_span_id(RUN), None)
    assert run.began == BEGAN
    assert run.attributes["stepfleet.status"] == "completed"
    assert run.attributes["gen_ai.agent.name"] == "clerk"
    assert run.error == ""
    assert run.links == ()


def test_a_child_run_names_its_parent_on_every_span_of_its_own() -> None:
    """MULTI-03"""
    state = a_claim().state.model_copy(update={"parent_agent_id": PARENT})
    verdict = a_verdict(Move.FINISH, stop_reason=StopReason.COMPLETED, state=state)
    step, run = spans_of(an_attempt(verdict, state=state))
    assert step.attributes["stepfleet.parent_run_id"] == PARENT
    assert run.attributes["stepfleet.parent_run_id"] == PARENT
    assert run.links == (PARENT,)


def test_a_failure_is_reported_by_its_code_and_never_in_words() -> None:
    """OBS-01: error status on step and run."""
    error = an_error(ErrorType.MODEL, code="MODEL_ERROR", message="sk-secret")
    verdict = a_verdict(Move.FINISH, stop_reason=StopReason.ERROR, failure=error, error="sk-secret")
    called = a_model_call(response=None, code="MODEL_ERROR", kind="model")
    model, step, run = spans_of(an_attempt(verdict, called))
    assert [one.error for one in (model, step, run)] == ["MODEL_ERROR"] * 3
    assert all(is_failure(one) for one in (model, step, run))
    assert "sk-secret" not in repr((model.attributes, step.attributes, run.attributes))


def test_attempts_that_are_made_again_have_spans_of_their_own() -> None:
    """OBS-01: one per attempt, different ids."""
    error = an_error(ErrorType.MODEL, code="MODEL_ERROR")
    again = a_verdict(Move.RETRY, logged=False, failure=error, delay=1.0)
    (first,) = spans_of(an_attempt(again))
    (second,) = spans_of(an_attempt(again, attempts=1))
    assert (first.name, first.error) == ("step_1", "MODEL_ERROR")
    assert first.span_id != second.span_id
    assert [one.attributes["stepfleet.attempt"] for one in (first, second)] == [1, 2]


def test_an_attempt_that_came_too_late_says_so_and_ends_no_run() -> None:
    """OBS-01"""
    verdict = a_verdict(Move.FINISH, stop_reason=StopReason.COMPLETED)
    (step,) = spans_of(an_attempt(verdict, applied=False))
    assert step.error == TAKEN_OVER


def test_a_step_that_was_never_begun_has_no_span() -> None:
    verdict = a_verdict(Move.FINISH, logged=False, stop_reason=StopReason.STEPS_LIMIT)
    (run,) = spans_of(an_attempt(verdict))
    assert run.name == "agent_run"
    assert run.attributes["stepfleet.stop_reason"] == "steps_limit"


def test_a_step_that_waits_is_one_span_over_all_its_workers() -> None:
    """OBS-03: what each of them tells stands below an id that all of them know."""
    waits = a_verdict(Move.WAIT, logged=False)
    (model,) = spans_of(an_attempt(waits, a_model_call()))
    taken = TakenCall(
        Work(RUN, 0, 0), "t", START, ToolCall(id="c1", name="add"), a_claim().config, 1
    )
    (tool,) = spans_of(ToolTaskObservation(taken, (a_tool_call(),), applied=True))
    journal = Journal(began=later(-60))
    (step,) = spans_of(an_attempt(a_verdict(), journal=journal))
    assert step.span_id == step_span_id(RUN, 1, 1)
    assert model.parent_id == tool.parent_id == step.span_id
    assert step.began == BEGAN - 60 * SECOND


def test_a_wait_for_a_person_says_who_decided_and_lasts_until_then() -> None:
    """OBS-01: and nothing of what was said."""
    made = Decision(approved=False, by="grace", at=later(-5), reason="canary-7")
    call = a_call(tool_name="refund", decision=made)
    verdict = a_verdict(logged=False)
    verdict = replace(verdict, logged=LoggedStep(result=a_step(1, tool_calls=(call,))))
    wait, step = spans_of(an_attempt(verdict, journal=Journal(began=later(-60))))
    assert (wait.name, wait.parent_id) == ("tool_decision", step.span_id)
    assert (wait.began, wait.ended) == (BEGAN - 60 * SECOND, BEGAN - 5 * SECOND)
    told = {name.rpartition(".")[2]: value for name, value in wait.attributes.items()}
    assert (told["decided_by"], told["approved"], told["by_default"]) == ("grace", False, False)
    assert "canary" not in str(wait)


def test_a_call_that_was_broken_off_did_not_fail() -> None:
    called = a_model_call(response=None, code=CANCELLED, kind=CANCELLED)
    model, _ = spans_of(an_attempt(a_verdict(Move.RELEASE, logged=False), called))
    assert model.error == CANCELLED
    assert not is_failure(model)


def test_model_calls_have_the_conventions_attributes() -> None:
    """OBS-01: of OpenTelemetry for generative AI; none without a value."""
    model, _ = spans_of(an_attempt(a_verdict(), a_model_call()))
    assert model.attributes == {
        "stepfleet.run_id": RUN,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt",
        "gen_ai.response.model": "gpt-1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 2,
    }


def test_a_refusal_is_no_span() -> None:
    assert list(spans_of(RefusalObservation(Refused.EARLY))) == []
