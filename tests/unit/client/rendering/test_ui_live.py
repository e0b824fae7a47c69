"""A chat window while its run goes on."""

from typing import Any

import pytest
from support.runs.ui_records import RUN, Told, two_steps

from stepfleet.orchestrator import Lifecycle, UIMessage
from stepfleet.orchestrator.client.rendering import (
    LiveMessages,
    StatusType,
    UIContinuation,
    UIRetry,
    UIRole,
    reconciled,
    rendered,
)


def told(**options: Any) -> Told:
    return Told(LiveMessages(RUN, **options))


def shown(events: Told) -> list[tuple[str, str]]:
    return [(one.role.value, one.content) for one in events.window.messages]


def test_a_running_tool_is_a_status_that_its_result_replaces() -> None:
    """UI-04"""
    events = told()
    events.started(1)
    events.tool_started("c1")
    (running,) = events.window.messages
    assert running.metadata is not None
    assert (running.role, running.content) == (UIRole.STATUS, "add(a: 1, b: 2)")
    assert running.metadata.status_type is StatusType.TOOL_CALL
    events.tool_completed("c1")
    (done,) = events.window.messages
    assert done.metadata is not None
    assert (done.id, done.role, done.content) == (running.id, UIRole.TOOL, "3")
    assert (done.metadata.tool_call_id, done.metadata.tool_result) == ("c1", "3")
    assert (done.metadata.tool_error, done.metadata.tool_duration_ms) == (None, 12.0)
    assert [one.args_summary for one in done.metadata.tool_calls] == ["a: 1, b: 2"]


def test_a_failed_tool_tells_its_error_in_place_of_a_result() -> None:
    """UI-04"""
    events = told()
    events.started(1)
    events.tool_started("c1")
    events.tool_completed("c1", error="no luck")
    events.completed(1, "no luck", calls=True)
    (done,) = events.window.messages
    assert done.metadata is not None
    assert (done.content, done.metadata.tool_error, done.metadata.tool_result) == (
        "no luck",
        "no luck",
        None,
    )


def test_tools_that_run_beside_each_other_stand_in_the_order_of_their_starts() -> None:
    """UI-04"""
    events = told()
    events.started(1)
    for call in ("c1", "c2"):
        events.tool_started(call)
    events.tool_completed("c2", result="second")
    events.tool_completed("c1", result="first")
    assert shown(events) == [("tool", "first"), ("tool", "second")]


def test_text_grows_while_it_is_written_and_stands_ahead_of_its_tools() -> None:
    """UI-02, UI-09"""
    events = told()
    events.status("in_progress")
    assert shown(events) == [("status", "Thinking...")]
    events.chunk(1, 0, "Let me ")
    assert shown(events) == [("assistant", "Let me ")]
    events.started(1)
    events.tool_started("c1")
    events.tool_completed("c1")
    events.completed(1, calls=True)
    assert not events.chunk(1, 0, "Let me ")
    events.chunk(1, 1, "add.", last=True)
    assert shown(events) == [
        ("assistant", "Let me add."),
        ("tool", "3"),
        ("status", "Thinking..."),
    ]
    first = events.window.messages[0].metadata
    assert first is not None
    assert (first.step_duration_ms, first.usage and first.usage.total_tokens) == (120.0, 15)


def test_text_that_comes_behind_its_tools_stands_ahead_of_them() -> None:
    """UI-02"""
    events = told()
    events.started(1)
    events.tool_started("c1")
    events.tool_completed("c1")
    events.completed(1, calls=True)
    events.chunk(1, 0, "Let me add.", last=True)
    assert shown(events) == [("assistant", "Let me add."), ("tool", "3")]


def test_text_that_turns_out_to_be_the_arguments_of_a_call_goes() -> None:
    """UI-03, UI-05"""
    events = told()
    events.chunk(1, 0, '{"a": 1}', last=True)
    assert shown(events) == [("assistant", '{"a": 1}')]
    events.started(1)
    events.tool_started("c1")
    assert [role for role, _ in shown(events)] == ["status"]


def test_an_answer_without_chunks_comes_with_the_end() -> None:
    """UI-02"""
    events = told()
    events.status("in_progress")
    events.started(1)
    events.completed(1)
    events.status("completed", last_response="It is 3.", step_count=1)
    assert shown(events) == [("assistant", "It is 3.")]
    assert events.window.is_over
    assert events.window.messages[0].id == f"{RUN}:step:1"


def test_a_further_turn_may_end_with_the_same_words() -> None:
    """UI-02: and one that fails does not end with those of the turn before."""
    events = told()
    for step in (1, 2):
        events.status("in_progress")
        events.started(step)
        events.completed(step)
        events.status("completed", last_response="Done.")
    assert shown(events) == [("assistant", "Done.")] * 2
    events.status("in_progress")
    events.started(3)
    events.completed(3, "the model is down")
    events.status("failed", last_response="Done.", error_message="the model is down")
    assert shown(events)[2:] == [("status", "the model is down")]


def test_an_answer_by_a_call_comes_behind_it() -> None:
    """UI-02"""
    events = told()
    events.status("in_progress")
    events.started(1)
    events.tool_started("c1", name="final_answer")
    events.tool_completed("c1", name="final_answer", result="ok")
    events.completed(1, calls=True)
    events.status("completed", last_response="It is 3.")
    assert shown(events) == [("tool", "ok"), ("assistant", "It is 3.")]
    assert events.window.messages[-1].id == f"{RUN}:step:1:answer"


def test_a_retry_tells_which_attempt_comes_and_goes_when_the_step_is_done() -> None:
    """UI-10: attempt k of n."""
    events = told(attempts=3)
    retried = {"step_number": 1, "error": "overloaded", "duration_ms": 5.0}
    texts = []
    for attempt, expected in ((1, UIRetry(attempt=2, of=3)), (3, UIRetry(attempt=4, of=None))):
        events.tell("step.retried", attempt=attempt, retry_in_seconds=1.5, **retried)
        (waiting,) = events.window.messages
        texts.append(waiting.content)
        assert waiting.metadata is not None
        assert waiting.metadata.retry == expected.model_copy(update={"retry_in_seconds": 1.5})
        assert waiting.metadata.status_type is StatusType.INFO
    assert texts == ["attempt 2 of 3 in 1.5 s: overloaded", "attempt 4 in 1.5 s: overloaded"]
    events.started(1)
    assert events.window.messages == ()


def test_the_decision_that_ends_a_run_is_reported_to_who_asks_for_it() -> None:
    """UI-06"""
    decision = {"should_continue": False, "stop_reason": "steps_limit", "resolved_by": "StepsLimit"}
    silent, asked = told(), told(continuation=True)
    for events in (silent, asked):
        goes_on = {**decision, "should_continue": True, "stop_reason": None}
        events.tell("continuation", step_number=1, evaluations=[], **goes_on)
        assert events.window.messages == ()
        events.tell("continuation", step_number=2, evaluations=[], **decision)
    assert silent.window.messages == ()
    (said,) = asked.window.messages
    assert said.content == "Stopped: steps_limit (StepsLimit)"
    assert said.metadata is not None
    assert said.metadata.status_type is StatusType.CONTINUATION
    assert said.metadata.continuation == UIContinuation.model_validate(decision)


def test_a_scripted_client_ends_equal_to_the_stored_history() -> None:
    """UI-07"""
    events = told(continuation=True)
    events.two_steps()
    history = rendered(two_steps())
    streamed = events.window.messages
    assert [one.id for one in streamed] == [one.id for one in history[1:]]
    assert streamed != history[1:]
    assert events.window.reconcile(history) == history


@pytest.mark.parametrize("state", Lifecycle)
def test_every_terminal_status_says_that_the_history_is_to_be_fetched(state: Lifecycle) -> None:
    """UI-07: and then no ephemeral status is left."""
    events = told()
    events.status("in_progress")
    events.status(state.value)
    ends = {"completed", "failed", "cancelled", "stopped"}
    assert events.window.is_over is (state.value in ends)
    if events.window.is_over:
        history = rendered(two_steps())
        assert events.window.reconcile(history) == history


def test_errors_stay_where_they_stood_and_other_statuses_go() -> None:
    """UI-07, UI-08"""
    events = told(continuation=True)
    events.two_steps()
    events.status("in_progress")
    events.started(3)
    events.completed(3, "the model is down")
    decision = {"should_continue": False, "stop_reason": "error", "resolved_by": "ErrorPolicy"}
    events.tell("continuation", step_number=3, evaluations=[], **decision)
    events.status("failed", error_message="gave up", last_response="It is 3.")
    history = rendered(two_steps())
    left = events.window.reconcile(history)
    assert left[:-2] == history
    assert [(one.role, one.content) for one in left[-2:]] == [
        (UIRole.STATUS, "the model is down"),
        (UIRole.STATUS, "gave up"),
    ]
    assert all(one.is_error for one in left[-2:])


def test_a_message_of_another_id_is_known_by_its_tool_call() -> None:
    """UI-07: an error behind it stays behind it."""
    history = rendered(two_steps())
    tool = history[2].model_copy(update={"id": "of-another-client"})
    events = told()
    events.started(9)
    events.completed(9, "it broke")
    (error,) = events.window.messages
    local = UIMessage(
        id="mine", role=UIRole.USER, content="hi", timestamp=history[0].timestamp, metadata=None
    )
    assert reconciled((local, tool, error), history) == (*history[:3], error, history[3])


def test_what_was_told_before_changes_nothing() -> None:
    """UI-07: events may come twice."""
    events = told()
    events.two_steps()
    before = events.window.messages
    assert events.window.sequence == events.count
    assert not events.window.add(events.envelope("step.started", step_number=1))
    assert events.window.messages == before


def test_a_step_that_is_done_anew_takes_the_place_of_the_one_before() -> None:
    """UI-07: behind a retry of a failed run."""
    events = told()
    events.started(1)
    events.completed(1, "the model is down")
    assert [one.is_error for one in events.window.messages] == [True]
    events.started(1)
    events.chunk(1, 0, "Better.", last=True)
    events.completed(1)
    assert shown(events) == [("assistant", "Better.")]


def test_a_pause_is_reported_while_it_lasts() -> None:
    """UI-02: statuses stand inline."""
    events = told()
    events.status("paused")
    assert shown(events) == [("status", "Paused")]
    events.status("in_progress")
    assert shown(events) == [("status", "Thinking...")]
