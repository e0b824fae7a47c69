"""Where time comes from: Redis's clock for stamps, monotonic clocks for durations."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
# People's clocks: what is shown, logged or scheduled on one machine only.
LOCAL = (
    "orchestrator/archive/places.py",  # compared with the times of temporary files
    "orchestrator/cli",
    "orchestrator/dashboard",
    "orchestrator/store/embedded",
    "orchestrator/events/broadcast.py",  # a receiver compares with its own clock
    "orchestrator/models/pricing",
    "orchestrator/store/fleet/quarantine",  # shown to people beside the message
    "orchestrator/tools/builtin.py",
    "worker/testing",
    "worker/engine/consumer.py",  # the time stamp that Celery's events have
    "worker/engine/transport",
    "worker/models/http_model.py",  # compared with a Retry-After that is a date
    "worker/models/tokens.py",  # compared with the date at which a token of another service expires
)
WALL_CLOCKS = {("time", "time"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}


def wall_clock_calls(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if named and (node.value.id, node.attr) in WALL_CLOCKS:  # type: ignore[attr-defined]
            yield f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def test_no_stamp_comes_from_a_workers_or_clients_clock() -> None:
    """TIME-20, DIST-17: one time source, so that clock differences change no limit."""
    found = [
        call
        for top in ("orchestrator", "worker")
        for file in (ROOT / top).rglob("*.py")
        if not str(file.relative_to(ROOT)).startswith(LOCAL)
        for call in wall_clock_calls(file)
    ]
    assert found == []
