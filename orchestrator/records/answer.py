"""A run's answer so far: its text, its data, and whether it is complete. Pure values."""

from typing import Any

from stepfleet.orchestrator.records.base import Record


class Answer(Record):
    """What an execution has answered under an answer contract.

    `final` says that nothing is missing any more. Before that, `text` is an answer whose data
    is still awaited. `structured` fits the schema of the name `schema_name`.
    """

    text: str | None = None
    structured: Any = None
    schema_name: str | None = None
    final: bool = False
