"""What a special tool makes of a call: the run goes on, or ends with text, or with data."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Continue:
    """The run goes on. `pending` is an answer's text whose data is still awaited."""

    pending: str | None = None


@dataclass(frozen=True, slots=True)
class ReturnAnswer:
    """The run ends with `text`."""

    text: str


@dataclass(frozen=True, slots=True)
class ReturnResult:
    """The run ends with data. `schema_name` names the schema that it was checked against.

    `text` None means the answer that was given before, or a default text.
    """

    structured: Any
    text: str | None = None
    schema_name: str | None = None


Outcome = Continue | ReturnAnswer | ReturnResult
