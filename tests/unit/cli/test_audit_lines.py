from datetime import UTC, datetime

import pytest

from stepfleet.orchestrator.cli.audit import line_of, since_given
from stepfleet.orchestrator.records.audit import AuditEntry

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
ENTRY = AuditEntry(
    at=NOW.isoformat(), user="ann", action="cancel", target="run 1", detail="done\x1b[2J"
)


@pytest.mark.parametrize(
    ("given", "means"),
    [(None, None), ("12h", datetime(2026, 11, 23, tzinfo=UTC)), ("2026-11-22", "2026-11-22")],
)
def test_since_is_a_time_or_how_long_ago(given: str | None, means: object) -> None:
    assert since_given(given, NOW) == means


def test_an_entry_is_one_line_without_what_moves_the_cursor() -> None:
    said = "2026-11-23 12:00:00 UTC  ann: cancel run 1: done"
    assert line_of(ENTRY).startswith(said)
    assert "\x1b" not in line_of(ENTRY)
    new = ENTRY.model_copy(update={"host": "box", "source": "stepfleet cancel"})
    assert "  ann@box (stepfleet cancel): cancel run 1" in line_of(new)
