"""What this version stores, workers of the version before can read, and the reverse."""

import copy
import json

import pytest
from support.documents.stored_fields import STORED, breaks, shapes

from stepfleet.orchestrator.records.base import SCHEMA_VERSION

NOW = shapes()
BEFORE = json.loads(STORED.read_text())


def test_records_have_only_got_fields_with_defaults_since_the_version_before() -> None:
    """OPS-04, SER-24: what takes more needs another SCHEMA_VERSION, and a reader of both."""
    if BEFORE["schema_version"] == SCHEMA_VERSION:
        assert breaks(BEFORE["records"], NOW) == []
    else:
        assert BEFORE["schema_version"] == SCHEMA_VERSION - 1


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda one: one["LostAttempt"]["fields"].pop("step"), ["LostAttempt.step is gone"]),
        (lambda one: one.pop("Role"), ["Role: value"]),
        (lambda one: one["LostAttempt"]["required"].append("n"), ["LostAttempt.n has no default"]),
        (
            lambda one: one["LostAttempt"]["fields"].update(step={"type": "string"}),
            ["LostAttempt.step has another type"],
        ),
        (lambda one: one["LostAttempt"]["fields"].update(new={"type": "string"}), []),
        (lambda one: one["Role"]["values"].append("new"), []),
    ],
)
def test_a_change_that_others_cannot_read_is_found(change: object, found: list[str]) -> None:
    changed = copy.deepcopy(NOW)
    assert callable(change)
    change(changed)
    told = breaks(NOW, changed)
    assert all(any(one.startswith(text) for one in told) for text in found)
    assert bool(told) == bool(found)
