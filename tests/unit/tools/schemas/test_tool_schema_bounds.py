"""Schemas by strangers: no part of one takes the bounds off, and none is made without a budget."""

import asyncio
import threading
import time
import tracemalloc
from contextlib import nullcontext, suppress
from typing import Any

import pytest

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.errors import ToolArgumentsError
from stepfleet.orchestrator.tools.schemas.checks import check_sound, checker_of
from stepfleet.orchestrator.tools.schemas.handles import handle_of
from stepfleet.orchestrator.tools.schemas.patterns import (
    MOST_PATTERNS,
    MOST_WORK,
    TooMuchMatchingError,
    cost_of,
    matches,
)
from stepfleet.orchestrator.tools.schemas.time_limit import allowed, limited, run_check, tick
from stepfleet.orchestrator.tools.schemas.validators import MOST_PARTS

LATEST = "https://json-schema.org/draft/2020-12/schema"
DIALECTS = [
    LATEST,
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema#",
    "http://json-schema.org/draft-06/schema#",
    "http://json-schema.org/draft-04/schema#",
    "http://json-schema.org/draft-03/schema#",
    "urn:unknown",
    "http://[",
]
EVIL = "^(a+)+$"
SLOW = "a" * 60 + "!"


def doubling(levels: int) -> dict[str, Any]:
    """Return a schema that is checked 2 ** levels times."""
    inner: dict[str, Any] = {
        f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(levels)
    }
    return {"type": "object", "$defs": {**inner, f"a{levels}": {}}, "$ref": "#/$defs/a0"}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "inner",
    [
        {"pattern": EVIL},
        {"allOf": [{"pattern": EVIL}]},
        {"$id": "http://example.com/inner", "pattern": EVIL},
    ],
)
def test_a_dialect_named_inside_a_schema_leaves_the_bounds_on(
    dialect: str, inner: dict[str, Any]
) -> None:
    """TOOL-10: without bounds this takes years."""
    is_known = not ("draft-03" in dialect and "allOf" in inner)
    inner = {"$schema": dialect, "type": "string", **inner}
    schema = {"type": "object", "properties": {"data": inner}}
    refused = pytest.raises(ToolArgumentsError, match="does not match")
    with refused if is_known else nullcontext():
        assert checker_of("t", schema)({"data": SLOW}) == {"data": SLOW}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("keyword", ["patternProperties", "unevaluatedProperties"])
def test_names_are_matched_within_bounds_too_in_a_dialect_inside(
    dialect: str, keyword: str
) -> None:
    patterned = {"patternProperties": {EVIL: False}, "required": ["x"]}
    inner = {"$ref": "#/$defs/d", keyword: {EVIL: {}} if keyword != "unevaluatedProperties" else {}}
    schema = {
        "type": "object",
        "$defs": {"d": {"$schema": dialect, **patterned}},
        "properties": {"data": {"$schema": dialect, "allOf": [inner, {"$ref": "#/$defs/d"}]}},
    }
    told = "'x' is a required property|schema cannot be used"
    with pytest.raises((ToolArgumentsError, ConfigurationError), match=told):
        checker_of("t", schema)({"data": {SLOW: 1}})


def test_a_dialect_inside_still_decides_what_keywords_mean() -> None:
    old = {"$schema": DIALECTS[2], "$id": "http://example.com/d", "dependencies": {"a": ["b"]}}
    schema = {"$schema": LATEST, "type": "object", "properties": {"data": old}}
    with pytest.raises(ToolArgumentsError, match="data: 'b' is a dependency of 'a'"):
        checker_of("t", schema)({"data": {"a": 1}})


def test_patterns_may_name_classes_of_unicode() -> None:
    named = {"$schema": LATEST, "pattern": r"^\p{Letter}+$"}
    check = checker_of("t", {"type": "object", "properties": {"data": named}})
    assert check({"data": "Straße"}) == {"data": "Straße"}
    with pytest.raises(ToolArgumentsError, match="does not match"):
        check({"data": "Straße 1"})


@pytest.mark.parametrize("beside", [{}, {"$id": "http://example.com/root"}])
@pytest.mark.parametrize("dialect", DIALECTS[:2])
def test_a_schema_may_ask_for_a_schema(beside: dict[str, Any], dialect: str) -> None:
    inner = {"$ref": dialect, **beside}
    check = checker_of("t", {"$schema": dialect, "type": "object", "properties": {"s": inner}})
    assert check({"s": {"$defs": {"a": {"type": "string"}}}})
    with pytest.raises(ToolArgumentsError, match=r"s\.\$defs\.a\.type"):
        check({"s": {"$defs": {"a": {"type": 1}}}})


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"allOf": [{} for _ in range(MOST_PARTS)]}, "objects and arrays"),
        ({"enum": ["x" * 1100] * 1000}, "characters"),
        ({"patternProperties": {f"^{n}": {} for n in range(MOST_PATTERNS + 1)}}, "patterns"),
        (
            {"properties": {f"p{n}": {"pattern": f"\\w{{{90 + n}}}"} for n in range(5)}},
            "16 MiB together",
        ),
        ({"properties": {"p": {"pattern": r"((\w{99}){99}){99}"}}}, "16 MiB together"),
        ({"$id": "http://[", "$ref": "#"}, "cannot be used|takes too long"),
    ],
)
def test_a_schema_beyond_its_budget_is_refused_with_the_reason(
    schema: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        checker_of("t", {"type": "object", **schema})({"p": "a"})


def test_a_schema_that_is_checked_for_ever_is_no_sound_one() -> None:
    with pytest.raises(ConfigurationError, match="takes too long"), allowed(0.2):
        check_sound("t", doubling(40))


def test_an_output_schema_has_a_budget_for_its_patterns() -> None:
    patterned = {f"p{n}": {"type": "string", "pattern": f"\\w{{{90 + n}}}"} for n in range(60)}
    with pytest.raises(ConfigurationError, match="size limit of 16 MiB together"):
        handle_of({"type": "object", "properties": patterned})


@pytest.mark.parametrize(
    ("pattern", "atoms"),
    [
        ("a{3}{4}", 12),
        ("(a|bc){2,}", 9),
        (r"\{10}", 4),
        ("[]x]{2}", 2),
        ("[^-]]a{2}", 4),
        (r"[\w[^x]&&y]{5}", 5),
        ("(?P<year>ab{2}){3}", 9),
        ("(?i)a{3}", 3),
        ("((a", 1),
    ],
)
def test_repetitions_of_a_pattern_are_counted(pattern: str, atoms: int) -> None:
    assert cost_of(pattern).atoms == atoms


@pytest.mark.parametrize("pattern", ["(?x) # [\n a{3}", "(?ix:a)", "[a-[b]]", "[a"])
def test_a_pattern_that_may_be_read_in_two_ways_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be used"):
        matches(pattern, "a")


def test_a_pattern_with_many_parts_takes_no_long_text() -> None:
    assert matches("a{1000}", "a" * 5000)
    with pytest.raises(TooMuchMatchingError):
        matches("a{1000}", "a" * (MOST_WORK // 1000 + 1))
    schema = {"type": "object", "properties": {"data": {"pattern": "a{1000}$"}}}
    with pytest.raises(ToolArgumentsError, match="take too long"):
        checker_of("t", schema)({"data": "a" * 20_000})


def test_a_long_text_that_fits_no_alternative_is_not_kept_once_for_each() -> None:
    """TOOL-10: 2,400 alternatives took 1 GB."""
    alternatives = {"anyOf": [{"type": "integer"}] * 300}
    check = checker_of("t", {"type": "object", "properties": {"data": alternatives}})
    with suppress(ToolArgumentsError):  # jsonschema's import is no part of it
        check({"data": "x"})
    tracemalloc.start()
    try:
        with pytest.raises(ToolArgumentsError, match="fits none of the allowed forms"):
            check({"data": "x" * 500_000})
        assert tracemalloc.get_traced_memory()[1] < 20 * 1024 * 1024
    finally:
        tracemalloc.stop()


async def test_a_long_check_leaves_the_event_loop() -> None:
    """Others go on meanwhile: this test's own coroutine does, and lets the check end."""
    home, started, seen = threading.get_ident(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def check(text: str) -> str:
        end = time.thread_time() + 60
        if threading.get_ident() != home:
            loop.call_soon_threadsafe(started.set)
        while time.thread_time() < end and not seen.is_set():
            tick()
        return text.upper()

    def bounded_check(text: str) -> str:
        with limited(60.0):
            return check(text)

    task = asyncio.create_task(run_check(bounded_check, "done"))
    await asyncio.wait_for(started.wait(), 60)
    seen.set()
    assert await task == "DONE"


async def test_a_brief_check_stays_where_it_is() -> None:
    assert await run_check(threading.get_ident) == threading.get_ident()


async def test_arguments_of_a_long_check_are_refused_where_they_were_called() -> None:
    with allowed(0.3), pytest.raises(ToolArgumentsError, match="take too long"):
        await run_check(checker_of("t", doubling(40)), {})
