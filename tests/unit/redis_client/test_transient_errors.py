"""Which of Redis's errors pass, what is told of them, and how often."""

import logging

import pytest
from redis import exceptions

from stepfleet.orchestrator import StoreError
from stepfleet.orchestrator.redis_client.transient_errors import (
    QUIET_SECONDS,
    OutageLog,
    TransientError,
    explained,
    transient_error_of,
)


@pytest.mark.parametrize(
    ("error", "trouble"),
    [
        (exceptions.ConnectionError("closed"), TransientError.AWAY),
        (exceptions.TimeoutError("slow"), TransientError.AWAY),
        (exceptions.BusyLoadingError("loading"), TransientError.AWAY),
        (OSError("no route"), TransientError.AWAY),
        (exceptions.OutOfMemoryError("command not allowed"), TransientError.REFUSES),
        (exceptions.ResponseError("MISCONF errors writing to the AOF"), TransientError.REFUSES),
        (exceptions.ResponseError("BUSY Redis is busy running a script"), TransientError.REFUSES),
        (exceptions.ReadOnlyError("read only replica"), TransientError.ELSEWHERE),
        (exceptions.MasterDownError("link is down"), TransientError.ELSEWHERE),
        (exceptions.ResponseError("NOREPLICAS Not enough good replicas"), TransientError.ELSEWHERE),
        (exceptions.TryAgainError("moving"), TransientError.MOVING),
        (exceptions.ClusterDownError("slot not served"), TransientError.MOVING),
        (exceptions.ResponseError("BUSYGROUP name exists"), None),
        (exceptions.ResponseError("WRONGTYPE of key"), None),
        (exceptions.NoScriptError("no script"), None),
        ("an answer", None),
        (None, None),
    ],
)
def test_an_error_that_passes_is_distinguished_from_one_that_lasts(
    error: object, trouble: TransientError | None
) -> None:
    assert transient_error_of(error) is trouble


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (exceptions.OutOfMemoryError("used memory > 'maxmemory'"), "raise its maxmemory"),
        (exceptions.ReadOnlyError("against a read only replica."), "name its master"),
        (exceptions.ResponseError("BUSY Redis is busy"), "SCRIPT KILL"),
        (exceptions.ResponseError("NOREPLICAS Not enough"), "bring its replicas back"),
        (exceptions.ConnectionError("refused"), "cannot be reached: refused"),
    ],
)
def test_the_error_that_a_caller_gets_names_the_fix(error: Exception, fix: str) -> None:
    told = explained(error)
    assert isinstance(told, StoreError)
    assert fix in str(told)


def test_an_error_that_lasts_reaches_the_caller_as_it_is() -> None:
    error = exceptions.ResponseError("WRONGTYPE")
    assert explained(error) is error


def test_a_trouble_that_lasts_is_said_again_each_minute_with_its_fix(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = OutageLog()
    full = exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
    with caplog.at_level(logging.WARNING):
        for second in range(150):
            watch.failed(TransientError.REFUSES, full, float(second))
    first, *later = (record.getMessage() for record in caplog.records)
    assert "stepfleet purge" in first
    assert [one.rpartition("for ")[2] for one in later] == ["60 s now", "120 s now"]


def test_a_trouble_is_said_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = OutageLog("The broker")
    with caplog.at_level(logging.WARNING):
        for second in range(30):
            watch.failed(TransientError.AWAY, OSError("no route"), float(second))
            watch.answered(second + QUIET_SECONDS / 2)
        for second in range(30, 60):
            watch.answered(float(second))
    began, ended = (record.getMessage() for record in caplog.records)
    assert began == "The broker does not answer (no route); waiting for it"
    assert ended.startswith("The broker answers again")
