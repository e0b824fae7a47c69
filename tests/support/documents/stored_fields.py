"""The shape of what lies in Redis: the fields of every stored record, and their types.

`stored_fields.json` has it as the version before wrote it, named by its commit: workers of that one
meet what this version writes. Write it anew for a commit that has landed, in its checkout:
python tests/support/documents/stored_fields.py > tests/support/documents/stored_fields.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.limits.limit import Limit
from stepfleet.orchestrator.records.base import SCHEMA_VERSION
from stepfleet.orchestrator.records.batch import FollowUp, Manifest
from stepfleet.orchestrator.records.calls.answers import After, Answer
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.memory_window import Remembered
from stepfleet.orchestrator.records.outcome import ContinuationOutcome
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.run.facts import LostAttempt, RunOrigin
from stepfleet.orchestrator.records.schedule import Schedule, ScheduleState
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import LoggedStep
from stepfleet.orchestrator.store.circuits import Circuit
from stepfleet.orchestrator.version import own_build

STORED = Path(__file__).with_suffix(".json")
KINDS = (
    *(After, AgentConfig, AgentState, Answer, Circuit, ContinuationOutcome, FollowUp, Limit),
    *(LLMResponse, LoggedStep, LostAttempt, Manifest, Remembered, RunOrigin, Schedule),
    *(ScheduleState, ToolCallRecord),
)
_WORDS = ("title", "description", "default", "examples")
Shape = dict[str, Any]


def shapes() -> dict[str, Shape]:
    """Return `{record: {"fields": {name: type}, "required": [...]}}`, or an enum's values.

    With all records below those that are stored.
    """
    _, found = models_json_schema([(kind, "validation") for kind in KINDS])
    return {name: _shape(one) for name, one in sorted(found["$defs"].items())}


def _shape(schema: dict[str, Any]) -> Shape:
    if "enum" in schema:
        return {"values": sorted(schema["enum"])}
    fields = {name: _plain(one) for name, one in sorted(schema.get("properties", {}).items())}
    return {"fields": fields, "required": sorted(schema.get("required", ()))}


def _plain(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {name: _plain(one) for name, one in schema.items() if name not in _WORDS}
    return [_plain(one) for one in schema] if isinstance(schema, list) else schema


def breaks(before: dict[str, Shape], now: dict[str, Shape]) -> list[str]:
    """Return what workers of the version before, or of this one, could not read of the other's.

    A new field with a default is none: it is left out while it has that.
    """
    found = []
    for name, old in before.items():
        new = now.get(name, {})
        lost = set(old.get("values", ())) - set(new.get("values", ()))
        found += [f"{name}: value {one!r} is gone" for one in sorted(lost)]
        for field, kind in old.get("fields", {}).items():
            if field not in new.get("fields", {}):
                found.append(f"{name}.{field} is gone")
            elif new["fields"][field] != kind:
                found.append(f"{name}.{field} has another type")
        needed = set(new.get("required", ())) - set(old.get("required", ()))
        found += [f"{name}.{one} has no default" for one in sorted(needed)]
    return found


def recorded() -> str:
    """Return the shapes as JSON, a record a line, with the version and the commit they are of."""
    known = {"commit": own_build().commit, "schema_version": SCHEMA_VERSION}
    lines = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in shapes().items()]
    records = ",\n".join(lines)
    return f'{json.dumps(known)[:-1]}, "records": {{\n{records}\n}}}}\n'


if __name__ == "__main__":
    sys.stdout.write(recorded())
