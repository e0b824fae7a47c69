"""The log of failed user code: its traceback, without secrets, and no flood of equal ones."""

import logging
from io import StringIO

import orjson
import pytest

from stepfleet.orchestrator.records.text.tracebacks import traceback_of
from stepfleet.worker.telemetry.logs import JsonLines
from stepfleet.worker.toolbox.failure_log import MOST_EQUAL, PERIOD, Equals, log, log_failure

SECRET = "canary-in-a-log-0123456789"


def failure(what: str) -> Exception:
    with pytest.raises(ValueError, match="login") as caught:
        raise ValueError(what)
    return caught.value


def test_a_flood_of_equal_causes_is_some_lines_and_then_their_number() -> None:
    now = 0.0
    equals = Equals(lambda: now)
    found = [equals.left_out("cause") for _ in range(10_000)]
    assert found == [0] * MOST_EQUAL + [None] * (10_000 - MOST_EQUAL)
    assert equals.left_out("another") == 0
    now = PERIOD
    assert equals.left_out("cause") == 10_000 - MOST_EQUAL
    assert equals.left_out("cause") == 0


def test_causes_without_end_do_not_fill_the_memory() -> None:
    equals = Equals(lambda: 0.0)
    for n in range(5000):
        equals.left_out(n)
    assert len(equals._counted) <= 500


@pytest.mark.parametrize("as_json", [False, True])
def test_the_line_has_the_traceback_and_no_secret(
    as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By any handler's formatter, also one of the user's own app."""
    monkeypatch.setenv("VAULT_PASSWORD", SECRET)
    error, written = failure(f"login with {SECRET} failed"), StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(message)s"))
    seen: list[logging.LogRecord] = []

    def see(record: logging.LogRecord) -> bool:
        seen.append(record)
        return True

    handler.addFilter(see)
    log.addHandler(handler)
    try:
        what = f"tool 'json={as_json}'"
        for _ in range(MOST_EQUAL + 3):
            log_failure(what, "the message", traceback_of(error), error, "a-run")
        log_failure(what, "without code of the user's", None, error)
    finally:
        log.removeHandler(handler)
    text = written.getvalue()
    assert SECRET not in text
    assert len(seen) == MOST_EQUAL
    assert seen[0].exc_info is not None
    assert seen[0].exc_info[1] is error
    line = orjson.loads(text.splitlines()[0])["exception"] if as_json else text
    assert f'File "{__file__}"' in line
    assert "ValueError: login with [redacted] failed" in line
    assert "of run a-run failed: the message" in text
