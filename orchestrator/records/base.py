"""The base of every record: frozen, strict about unknown fields, JSON in and out.

Knows nothing of Redis, Celery or HTTP.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict


def well_formed(text: str) -> str:
    """Return `text` with every lone surrogate replaced by its escape; mostly `text` itself."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


SCHEMA_VERSION = 3
"""Version of the records as stored. Readers accept this one and the one before it."""


class Record(BaseModel):  # noqa: PLW1641 - pydantic gives frozen models their hash
    """A frozen value. "With" methods of subclasses return changed copies."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON-ready data."""
        # Without pydantic's wrapper, which takes as long as a small record.
        data: dict[str, Any] = self.__pydantic_serializer__.to_python(self, mode="json")
        return data

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is of the same class and has equal fields.

        What is stored leaves out what equals its default; pydantic's own takes five times as long.
        """
        if self is other:
            return True
        if self.__class__ is not other.__class__:
            return NotImplemented
        mine, others = self.__dict__, other.__dict__
        if len(mine) == len(others) == len(type(self).__pydantic_fields__):
            return mine == others
        return super().__eq__(other)  # one has cached properties

    def to_json(self) -> str:
        """Return the record as it is stored: fields that hold their default are left out."""
        return self.json_without(None)

    def json_without(self, names: set[str] | None) -> str:
        """Return the record as it is stored, and without the fields of these names."""
        # Without pydantic's wrapper, which takes as long as a small record.
        written: bytes = self.__pydantic_serializer__.to_json(
            self, exclude=names, exclude_defaults=True, exclude_computed_fields=True
        )
        return written.decode()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with the fields of `update` changed, which are not validated."""
        if deep:
            return super().model_copy(update=update, deep=True)
        changes = update or {}
        given = self.__pydantic_fields_set__
        if not given.issuperset(changes):
            given = given | changes.keys()
        return _made(type(self), {**self.__dict__, **changes}, given)

    @classmethod
    def model_construct(  # type: ignore[override]  # pydantic's plugin cannot tell
        cls, _fields_set: set[str] | None = None, **values: Any
    ) -> Self:
        """Return a record of values that are known to be valid: nothing is checked.

        pydantic's own walks through all fields at every call, a step makes some thirty records.
        All fields count as given, unless `_fields_set` names some.
        """
        plain, factories, names = _fields_of(cls)
        fields = {**plain, **values}
        for name, make in factories:
            if name not in values:
                fields[name] = make()
        return _made(cls, fields, names if _fields_set is None else _fields_set)

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> Self:
        """Return a record of all its `fields`, which are known to be valid."""
        return _made(cls, fields, _fields_of(cls)[2])

    @classmethod
    def from_json(cls, data: str | bytes) -> Self:
        """Read what `to_json` wrote. Raises `pydantic.ValidationError` on anything else."""
        record: Self = cls.__pydantic_validator__.validate_json(data)
        return record


R = TypeVar("R", bound=Record)


def _setter(name: str) -> Callable[[Any, Any], None]:
    """Return a setter of a frozen model's attribute, by its slot if it has one: quicker."""
    slot = vars(BaseModel).get(name)
    if slot is not None:
        return cast("Callable[[Any, Any], None]", slot.__set__)
    return lambda record, value: object.__setattr__(record, name, value)


# The attributes of every model that pydantic documents.
_new = object.__new__
_set_values = _setter("__dict__")
_set_given = _setter("__pydantic_fields_set__")
_set_extra = _setter("__pydantic_extra__")
_set_private = _setter("__pydantic_private__")


def _made(kind: type[R], values: dict[str, Any], given: set[str]) -> R:
    record = _new(kind)
    _set_values(record, values)
    _set_given(record, given)
    _set_extra(record, None)
    _set_private(record, None)
    return record


@cache
def _fields_of(
    kind: type[Record],
) -> tuple[dict[str, Any], tuple[tuple[str, Callable[[], Any]], ...], set[str]]:
    """Return the defaults that all records of a kind share, what makes others, and all names."""
    plain, factories = {}, []
    for name, field in kind.model_fields.items():
        if field.default_factory is not None:
            factories.append((name, cast("Callable[[], Any]", field.default_factory)))
        elif not field.is_required():
            plain[name] = field.default
    return plain, tuple(factories), set(kind.model_fields)
