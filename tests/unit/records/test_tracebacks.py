"""Tracebacks of user code: what is in them, how long they are, and what is never in them."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from stepfleet.orchestrator import Middleware
from stepfleet.orchestrator.errors import ConfigurationError, ModelError, ToolNotFoundError
from stepfleet.orchestrator.records.text.tracebacks import LONGEST, place_of, traceback_of
from stepfleet.orchestrator.tools.middleware import through_tool


def raised_by(function: Callable[[], Any]) -> Exception:
    try:
        function()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error
    raise AssertionError("nothing was raised")


def text_of(function: Callable[[], Any]) -> str:
    found = traceback_of(raised_by(function))
    assert found is not None
    return found


def fails(value: str = "value") -> None:
    raise KeyError(value)


def test_it_ends_with_the_error_and_names_files_and_lines_without_values() -> None:
    local = "a-local-value-that-is-nowhere"
    text = text_of(fails)
    assert text.startswith("Traceback (most recent call last):\n")
    assert f'File "{__file__}", line ' in text
    assert text.endswith("KeyError: 'value'")
    assert "raise KeyError(value)" in text
    assert local not in text


def test_causes_are_in_it_and_what_is_suppressed_is_not() -> None:
    def because() -> None:
        try:
            fails()
        except KeyError as error:
            raise RuntimeError("wrapped") from error

    def hidden() -> None:
        try:
            fails("hidden-one")
        except KeyError:
            raise RuntimeError("alone") from None

    text = text_of(because)
    assert text.index("KeyError") < text.index("direct cause") < text.index("RuntimeError: wrapped")
    assert "hidden-one" not in text_of(hidden)


async def test_frames_of_stepfleet_are_left_out_of_the_middle() -> None:
    class Layer(Middleware):
        async def around_tool(self, call: Any, invocation: Any, call_next: Any) -> Any:
            return await call_next(call)

    async def execute(call: Any) -> Any:
        fails(call)

    with pytest.raises(KeyError) as caught:
        await through_tool((Layer(),), "x", None, execute)  # type: ignore[arg-type]
    text = traceback_of(caught.value)
    assert text is not None
    assert text.index("in around_tool") < text.index("in fails")
    assert "middleware.py" not in text


def test_an_error_without_code_of_the_user_has_none() -> None:
    """The first frame belongs to a library, or there is no frame at all."""
    assert traceback_of(ToolNotFoundError("no such tool")) is None
    error = ValueError("of a library")
    try:
        json.loads("{")
    except ValueError as found:
        # Without this test's own frame: as if Stepfleet had called the library.
        trace = found.__traceback__
        error = found.with_traceback(trace.tb_next if trace else None)
    assert traceback_of(error) is None


def test_a_wrapped_error_of_the_users_model_keeps_where_it_came_from() -> None:
    def wrapped() -> None:
        try:
            fails()
        except KeyError as error:
            raise ModelError("model Mine failed") from error

    raised = raised_by(wrapped)
    assert isinstance(raised, ModelError)
    info = raised.to_info()
    assert info.traceback is not None
    assert "in fails" in info.traceback
    assert "traceback" not in ConfigurationError("a setting").to_info().to_dict()


def test_it_is_bounded_whatever_is_raised() -> None:
    def deep(left: int) -> None:
        if left:
            deep(left - 1)
        raise ValueError("x" * 1_000_000)

    def chained() -> None:
        error: Exception = ValueError("first")
        for n in range(200):
            error = raised_by(partial(again, n, error))
        raise error

    def again(n: int, error: Exception) -> None:
        raise RuntimeError(f"number {n}") from error

    for one in (lambda: deep(500), chained):
        text = text_of(one)
        assert len(text) < LONGEST + 100
        assert text.count("  File ") <= 80
    assert "Previous line repeated 16 more times" in text_of(lambda: deep(500))


def test_groups_and_errors_that_cannot_be_shown_do_no_harm() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    def grouped() -> None:
        raise ExceptionGroup("two", [raised_by(lambda: fails("inner")), ValueError("other")])

    def mute() -> None:
        raise MuteError

    def surrogate() -> None:
        raise ValueError("\ud800")

    assert "KeyError: 'inner'" in text_of(grouped)
    assert "MuteError" in text_of(mute)
    text_of(surrogate).encode()


def test_a_secret_is_in_none_also_where_the_text_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "canary-of-a-traceback-0123456789"
    monkeypatch.setenv("VAULT_PASSWORD", secret)
    for before in (0, 470, 3980):
        text = text_of(partial(fails, "x" * before + secret))
        assert secret[:8] not in text
        assert secret[-8:] not in text


def test_the_place_is_equal_for_equal_causes() -> None:
    def there(value: str) -> str:
        return text_of(lambda: fails(value))

    assert place_of(there("one")) == place_of(there("two"))
    assert place_of(there("one")) != place_of(text_of(lambda: asyncio.run(None)))  # type: ignore[arg-type]
