"""The tool calls of a run's log, read lazily."""

from collections.abc import Sequence
from typing import Any, overload

from pydantic import ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord


class _Result(Record):
    model_config = ConfigDict(extra="ignore")

    tool_calls: tuple[ToolCallRecord, ...] = ()


class _Step(Record):
    model_config = ConfigDict(extra="ignore")

    result: _Result


class LoggedCalls(Sequence[ToolCallRecord]):
    """The calls of stored steps (`LoggedStep` as JSON), and of later steps.

    Every claim holds the whole log, and hardly any criterion reads earlier calls: building the
    records at each step would cost more than all its decisions. The first access raises
    `pydantic.ValidationError` where a stored step cannot be read.
    """

    __slots__ = ("_later", "_read", "_stored")

    def __init__(
        self, stored: Sequence[str | bytes] = (), later: tuple[ToolCallRecord, ...] = ()
    ) -> None:
        self._stored = stored
        self._later = later
        self._read: tuple[ToolCallRecord, ...] | None = None

    def __add__(self, calls: tuple[ToolCallRecord, ...]) -> "LoggedCalls":
        """Return these calls followed by others, unread as long as these are."""
        longer = LoggedCalls(self._stored, self._later + calls)
        if self._read is not None:
            longer._read = self._read + calls
        return longer

    def __radd__(self, calls: tuple[ToolCallRecord, ...]) -> tuple[ToolCallRecord, ...]:
        """Return others followed by these calls."""
        return calls + self._calls

    @overload
    def __getitem__(self, place: int) -> ToolCallRecord: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[ToolCallRecord, ...]: ...
    def __getitem__(self, place: int | slice) -> ToolCallRecord | tuple[ToolCallRecord, ...]:
        """Return a call, or several."""
        return self._calls[place]

    def __len__(self) -> int:
        """Return how many calls there are."""
        return len(self._calls)

    def __eq__(self, other: object) -> bool:
        """Return whether `other` has equal calls in the same order."""
        return isinstance(other, tuple | LoggedCalls) and self._calls == tuple(other)

    def __hash__(self) -> int:
        """Return the hash of the calls."""
        return hash(self._calls)

    def __repr__(self) -> str:
        """Return the calls as a tuple shows them."""
        return repr(self._calls)

    @property
    def _calls(self) -> tuple[ToolCallRecord, ...]:
        if self._read is None:
            steps = map(_Step.from_json, self._stored)
            logged = tuple(call for step in steps for call in step.result.tool_calls)
            self._read = logged + self._later
        return self._read

    @classmethod
    def __get_pydantic_core_schema__(
        cls, _source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Serialize as the tuple of the calls; only our own store makes unread ones."""
        return core_schema.is_instance_schema(
            cls,
            serialization=core_schema.plain_serializer_function_ser_schema(
                tuple, return_schema=handler(tuple[ToolCallRecord, ...])
            ),
        )
