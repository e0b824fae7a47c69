"""Chunks folded into text, whatever happens to them on their way."""

from typing import Any

from stepfleet.orchestrator import StreamedText


def chunk(
    text: str, index: int, *, step: int = 1, attempt: int = 1, last: bool = False
) -> dict[str, Any]:
    payload = {
        "step_number": step,
        "attempt": attempt,
        "chunk_index": index,
        "chunk": text,
        "tokens_delta": 1,
        "is_complete": last,
    }
    return {"type": "agent.stream.chunk", "payload": payload}


def test_chunks_make_the_text_and_the_last_one_closes_it() -> None:
    """EVT-11, STRM-05"""
    text = StreamedText()
    assert text.add(chunk("Hel", 0))
    assert (text.is_open, text.is_whole(1)) == (True, False)
    assert text.add(chunk("lo", 1))
    assert not text.add(chunk("", 2, last=True))
    assert (text.text, text.is_open) == ("Hello", False)
    assert [text.is_whole(step) for step in (0, 1, 2)] == [True, True, False]


def test_a_new_attempt_starts_the_text_anew_and_the_old_one_is_not_heard_again() -> None:
    """STRM-09"""
    text = StreamedText()
    text.add(chunk("The old", 0))
    assert text.add(chunk("The", 0, attempt=2))
    assert text.text == "The"
    assert not text.add(chunk(" text", 1))
    text.add(chunk(" new", 1, attempt=2))
    assert text.text == "The new"


def test_what_comes_twice_counts_once() -> None:
    """STRM-09"""
    text = StreamedText()
    for _ in range(2):
        text.add(chunk("a", 0))
        text.add(chunk("b", 1))
    assert text.text == "ab"


def test_steps_have_texts_of_their_own_and_other_events_change_nothing() -> None:
    """STRM-05"""
    text = StreamedText()
    text.add(chunk("first", 0, last=True))
    text.add(chunk("second", 0, step=2))
    assert not text.add({"type": "agent.status", "payload": {"status": "completed"}})
    assert (text.of(1), text.of(2), text.text, text.of(3)) == ("first", "second", "second", "")
    assert text.is_open
