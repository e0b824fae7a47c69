"""The base of every record: frozen, strict about unknown fields, JSON in and out.

Knows nothing of Redis, Celery or HTTP.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Self, TypeVar, cast

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

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with the fields of `update` changed, which are not validated."""
        if deep:
            return super().model_copy(update=update, deep=True)
        changes = update or {}
        fields = {**self.__dict__, **changes}
        return _made(type(self), fields, self.__pydantic_fields_set__ | changes.keys())

    @classmethod
    def model_construct(  # type: ignore[override]  # pydantic's plugin cannot tell
        cls, _fields_set: set[str] | None = None, **values: Any
    ) -> Self:
        """Return a record of values that are known to be valid: nothing is checked.

        pydantic's own walks through all fields at every call, a step makes some thirty records.
        """
        plain, factories = _defaults(cls)
        fields = {**plain, **values}
        for name, make in factories:
            if name not in values:
                fields[name] = make()
        return _made(cls, fields, values.keys() if _fields_set is None else _fields_set)

    @classmethod
    def from_json(cls, data: str | bytes) -> Self:
        """Read what `to_json` wrote. Raises `pydantic.ValidationError` on anything else."""
        return cls.model_validate_json(data)


R = TypeVar("R", bound=Record)


def _made(kind: type[R], fields: dict[str, Any], given: Iterable[str]) -> R:
    record = kind.__new__(kind)
    set_ = object.__setattr__
    set_(record, "__dict__", fields)
    set_(record, "__pydantic_fields_set__", set(given))
    set_(record, "__pydantic_extra__", None)
    set_(record, "__pydantic_private__", None)
    return record


@cache
def _defaults(
    kind: type[Record],
) -> tuple[dict[str, Any], tuple[tuple[str, Callable[[], Any]], ...]]:
    """Return the defaults that all records of a kind share, and what makes the others."""
    plain, factories = {}, []
    for name, field in kind.model_fields.items():
        if field.default_factory is not None:
            factories.append((name, cast("Callable[[], Any]", field.default_factory)))
        elif not field.is_required():
            plain[name] = field.default
    return plain, tuple(factories)
