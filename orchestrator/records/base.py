"""The base of every record: frozen, strict about unknown fields, JSON in and out.

Knows nothing of Redis, Celery or HTTP.
"""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1
"""Version of the records as stored. Readers accept this one and the one before it."""


class Record(BaseModel):
    """A frozen value. "With" methods of subclasses return changed copies."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON-ready data."""
        return self.model_dump(mode="json")

    def to_json(self) -> str:
        """Return the record as it is stored: fields that hold their default are left out."""
        return self.model_dump_json(exclude_defaults=True, exclude_computed_fields=True)

    @classmethod
    def from_json(cls, data: str | bytes) -> Self:
        """Read what `to_json` wrote. Raises `pydantic.ValidationError` on anything else."""
        return cls.model_validate_json(data)
