"""Which events a run publishes beyond the usual ones, and in which detail. Pure values."""

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from stepfleet.orchestrator.records.base import Record


class BroadcastConfig(Record):
    """The events of an agent's runs; the default is the preset `minimal`.

    `include_stream_chunks` streams every model call and publishes its text while it is written;
    `include_continuation_trace` adds an event for every evaluation after a step;
    `include_tool_args` publishes whole arguments, texts cut to `max_arg_length` characters, in
    place of a summary. Without `auto_status_tracking` changes of status are kept in the run's
    record and not broadcast.

    The name of a preset is accepted in its place: `broadcast="debug"`.
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "minimal": {},
        "standard": {"include_stream_chunks": True},
        "debug": {
            "include_stream_chunks": True,
            "include_continuation_trace": True,
            "include_tool_args": True,
            "max_arg_length": 500,
        },
    }

    include_stream_chunks: bool = False
    include_continuation_trace: bool = False
    include_tool_args: bool = False
    max_arg_length: int = Field(default=100, ge=4)
    auto_status_tracking: bool = True

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        if given not in cls.PRESETS:
            known = ", ".join(cls.PRESETS)
            raise ValueError(f"{given!r} is no preset; write one of {known}, or the fields")
        return cls.PRESETS[given]

    @classmethod
    def minimal(cls) -> Self:
        """Return the preset with nothing beyond steps, tools and statuses."""
        return cls()

    @classmethod
    def standard(cls) -> Self:
        """Return the preset that adds the text while it is written."""
        return cls(**cls.PRESETS["standard"])

    @classmethod
    def debug(cls) -> Self:
        """Return the preset that adds everything."""
        return cls(**cls.PRESETS["debug"])
