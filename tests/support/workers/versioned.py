"""Runs a module as a release would whose records have the version that RECORD_VERSION names.

`python versioned.py MODULE ARGUMENT...`. A version after ours also writes a field that ours does
not know, and reads it, as a real one would.
"""

import os
import runpy
import sys
from typing import Any

import orjson

from stepfleet.orchestrator.records import base
from stepfleet.orchestrator.store import compression

OURS = base.SCHEMA_VERSION
NEWS = "news_of_the_next_version"
TOLD = ("LoggedStep", "LLMResponse", "ToolCallRecord")


def become(version: int) -> None:
    """Have everything that is imported from here on believe that this is the version."""
    base.SCHEMA_VERSION = version
    if version <= OURS:
        return
    write, read = base.Record.json_without, base.Record.from_json.__func__  # type: ignore[attr-defined]

    def json_without(record: base.Record, names: set[str] | None) -> str:
        text = write(record, names)
        if type(record).__name__ not in TOLD:
            return text
        return orjson.dumps({**orjson.loads(text), NEWS: "kept"}).decode()

    def from_json(cls: type[base.Record], data: str | bytes) -> Any:
        fields = orjson.loads(data)
        fields.pop(NEWS, None)
        return read(cls, orjson.dumps(fields))

    unpack = compression.unpacked

    def unpacked(stored: str) -> bytes:
        record = unpack(stored)
        if NEWS.encode() not in record:
            return record
        fields = orjson.loads(record)
        fields.pop(NEWS, None)
        return orjson.dumps(fields)

    compression.unpacked = unpacked
    base.Record.json_without = json_without  # type: ignore[assignment, method-assign]
    base.Record.from_json = classmethod(from_json)  # type: ignore[assignment, method-assign]


def rewrite_scripts(version: int) -> None:
    """Have the scripts write that version, too."""
    from stepfleet.orchestrator.store import lua  # noqa: PLC0415 - it takes the version over

    texts = dict(lua.file_texts())
    ours = f"BEFORE, OURS = '{OURS - 1}', '{OURS}'"
    assert ours in texts["wait"]
    texts["wait"] = texts["wait"].replace(ours, f"BEFORE, OURS = '{version - 1}', '{version}'")
    lua.file_texts = lambda: texts  # type: ignore[assignment]


if __name__ == "__main__":
    become(int(os.environ["RECORD_VERSION"]))
    rewrite_scripts(int(os.environ["RECORD_VERSION"]))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
