"""Schemas and data at random: as jsonschema judges them, and in bounded time where it would not.

`SCHEMA_FUZZ=5000 pytest ...` tries more of them.
"""

import os
import time
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as some

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.tools.schemas.time_limit import TooMuchWorkError
from stepfleet.orchestrator.tools.schemas.validators import errors_of, validator_of

EXAMPLES = int(os.environ.get("SCHEMA_FUZZ", "60"))
DIALECTS = {
    "http://json-schema.org/draft-04/schema#": jsonschema.Draft4Validator,
    "http://json-schema.org/draft-07/schema#": jsonschema.Draft7Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema.Draft201909Validator,
    "https://json-schema.org/draft/2020-12/schema": jsonschema.Draft202012Validator,
}
LATEST = list(DIALECTS)[-1]
HARMLESS = ["^a", "b$", "^[ab]+$", "a.b", "", "^(a|b)*c?$", "x{2,3}"]
HOSTILE = ["^(a+)+$", "^(a|a)*$", "^(a|aa)+$", "(a*)*b", "^(([a-z])+.)+[A-Z]([a-z])+$", "(.*)*=.*"]
LONG = "a" * 4_000 + "!"
CPU_SECONDS = 20.0
"""The limit is 2; what jsonschema does between two looks at the clock comes on top of it."""

names = some.sampled_from(["a", "b", "ab", "xx", "ca"])


def documents(texts: some.SearchStrategy[str]) -> some.SearchStrategy[Any]:
    """Return values of JSON."""
    plain = some.none() | some.booleans() | some.integers(-2, 4) | some.just(1.5) | texts
    return some.recursive(
        plain,
        lambda inner: some.lists(inner, max_size=4) | some.dictionaries(texts, inner, max_size=4),
        max_leaves=12,
    )


def schemas(patterns: list[str], values: some.SearchStrategy[Any]) -> some.SearchStrategy[Any]:
    """Return schemas of JSON Schema, with what makes their keywords meet each other."""
    pattern = some.sampled_from(patterns)
    count = some.integers(0, 3)

    def around(inner: some.SearchStrategy[Any]) -> some.SearchStrategy[Any]:
        several = some.lists(inner, min_size=1, max_size=3)
        part = inner | some.booleans()
        return some.fixed_dictionaries(
            {},
            optional={
                "type": some.sampled_from(["object", "array", "string", "integer", "number"]),
                "properties": some.dictionaries(names, inner, max_size=3),
                "patternProperties": some.dictionaries(pattern, inner, max_size=3),
                "additionalProperties": part,
                "unevaluatedProperties": part,
                "unevaluatedItems": some.booleans(),
                "propertyNames": inner,
                "required": some.lists(names, min_size=1, max_size=2, unique=True),
                "dependentSchemas": some.dictionaries(names, inner, max_size=2),
                "minProperties": count,
                "items": inner,
                "contains": inner,
                "minItems": count,
                "uniqueItems": some.booleans(),
                "pattern": pattern,
                "maxLength": count,
                "enum": some.lists(values, min_size=1, max_size=3, unique_by=repr),
                "minimum": count,
                "allOf": several,
                "anyOf": several,
                "oneOf": several,
                "not": inner,
                "if": inner,
                "then": inner,
                "else": inner,
                "$ref": some.sampled_from(["#/$defs/one", "#/$defs/two"]),
            },
        )

    leaf = some.sampled_from([{"type": "string"}, {"type": "integer"}, {}, {"$ref": "#/$defs/two"}])
    inner = some.recursive(leaf | pattern.map(lambda one: {"pattern": one}), around, max_leaves=6)
    return some.builds(
        lambda schema, one, two: {**schema, "$defs": {"one": one, "two": two}},
        around(inner),
        inner,
        some.sampled_from([{"type": "string"}, {"maxLength": 2}, {"patternProperties": {"a": {}}}]),
    )


def judged(dialect: str, schema: dict[str, Any], data: Any) -> bool:
    """Return whether data are right, as tools' arguments are judged."""
    return not errors_of(validator_of(schema, default=dialect), data, 1)


def is_ours(dialect: str, schema: Any) -> bool:
    """Return whether jsonschema departs from the specification here.

    In 2019-09 it takes `unevaluatedProperties` for a mapping of names, and lets `contains` count.
    """
    return dialect.endswith("2019-09/schema") and "unevaluated" in repr(schema)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    dialect=some.sampled_from(list(DIALECTS)),
    schema=schemas(HARMLESS, documents(names)),
    data=documents(names),
)
@example(
    dialect=LATEST,
    schema={"allOf": [{"patternProperties": {"^a": {}}}], "unevaluatedProperties": False},
    data={"ab": 1},
)
@example(
    dialect=LATEST,
    schema={
        "anyOf": [{"patternProperties": {"^a": {"type": "string"}}}, {}],
        "unevaluatedProperties": False,
    },
    data={"ab": 1},
)
def test_schemas_at_random_are_judged_as_jsonschema_judges_them(
    dialect: str, schema: dict[str, Any], data: Any
) -> None:
    if is_ours(dialect, schema):
        return
    try:
        expected = DIALECTS[dialect](schema).is_valid(data)
    except BaseException as error:
        if not isinstance(error, RecursionError) and type(error).__name__ != "PanicException":
            raise
        with pytest.raises((RecursionError, TooMuchWorkError)):
            judged(dialect, schema, data)
        return
    assert judged(dialect, schema, data) == expected


def hostile_data() -> some.SearchStrategy[Any]:
    """Return data that keep an engine that backtracks busy for ever, or that are large."""
    texts = some.sampled_from([LONG, "a" * 40 + "!", "ab", "a"])
    many = some.sampled_from(
        [
            {f"a{n}": n for n in range(20_000)},
            list(range(20_000)),
            [LONG] * 5,
            {"a": {"ab": {LONG: {LONG: 1}}}},
        ]
    )
    return documents(texts) | many


@settings(
    max_examples=max(EXAMPLES // 5, 1), deadline=None, suppress_health_check=list(HealthCheck)
)
@given(
    dialect=some.sampled_from(list(DIALECTS)),
    inside=some.sampled_from([None, *DIALECTS]),
    schema=schemas(HOSTILE, documents(names)),
    data=hostile_data(),
)
@example(
    dialect=LATEST,
    inside=None,
    schema={"patternProperties": {"^(a+)+$": {}}, "unevaluatedProperties": False},
    data={LONG: 1},
)
@example(
    dialect=LATEST,
    inside=None,
    schema={"contains": {}, "unevaluatedItems": False},
    data=list(range(30_000)),
)
@example(
    dialect=LATEST,
    inside=None,
    schema={
        "patternProperties": {"z": {}},
        "additionalProperties": {},
        "unevaluatedProperties": {},
    },
    data={f"a{n}": n for n in range(30_000)},
)
def test_schemas_at_random_are_judged_in_bounded_time(
    dialect: str, inside: str | None, schema: dict[str, Any], data: Any
) -> None:
    """TOOL-10: with jsonschema's own keywords some of these end in years, and this test never."""
    if inside:
        schema = {"$defs": schema["$defs"], "allOf": [{"$schema": inside, **schema}]}
    begun = time.thread_time()
    with suppress(ConfigurationError, TooMuchWorkError, RecursionError):  # said, and in time
        judged(dialect, schema, data)
    assert time.thread_time() - begun < CPU_SECONDS
