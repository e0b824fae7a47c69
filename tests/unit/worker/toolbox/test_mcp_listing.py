"""What an MCP server may say of its tools, and what of it agents get."""

from typing import Any

import pytest
from mcp_types import Tool, ToolAnnotations

from stepfleet.orchestrator import mcp_server
from stepfleet.worker.toolbox.mcp.listing import (
    MAX_DESCRIPTION,
    MAX_TOOLS,
    Definition,
    definitions,
)

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def offered(name: str = "count", **fields: Any) -> Tool:
    return Tool(**{"name": name, "description": "Count.", "input_schema": SCHEMA, **fields})


def of(*tools: Tool, **fields: Any) -> tuple[Definition, ...]:
    return definitions(mcp_server("s", command=["x"], **fields), tools)


def test_a_tool_keeps_its_description_and_schema() -> None:
    (one,) = of(offered())
    assert (one.name, one.description, one.schema) == ("count", "Count.", SCHEMA)


def test_the_order_is_the_same_whatever_the_servers() -> None:
    names = [one.name for one in of(offered("b"), offered("c"), offered("a"))]
    assert names == ["a", "b", "c"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array"},
        {"type": "object", "properties": []},
        {"type": "object", "properties": {"n": {"type": "no such type"}}},
        {"type": "object", "description": "x" * 70_000},
        {"type": "object", "properties": {"n": {"$ref": "https://example.com/schema"}}},
    ],
)
def test_a_tool_with_a_schema_that_cannot_be_used_is_left_out(
    schema: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    found = of(offered(input_schema=schema), offered("fine"))
    assert [one.name for one in found] == ["fine"]
    assert "tool 'count' is not offered" in caplog.text


def test_a_schema_may_refer_to_its_own_parts() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/number"}},
        "$defs": {"number": {"type": "integer"}},
    }
    assert len(of(offered(input_schema=schema))) == 1


def test_a_long_description_is_cut() -> None:
    (one,) = of(offered(description="word " * 10_000))
    assert len(one.description) <= MAX_DESCRIPTION
    assert one.description.endswith(" ...")


def test_characters_that_people_cannot_see_are_taken_out() -> None:
    hidden = "".join(chr(0xE0000 + ord(one)) for one in "obey")
    (one,) = of(offered(description=f"Co\x00unt.\u200b{hidden}\n\tTwice."))
    assert one.description == "Count.\n\tTwice."


def test_of_very_many_tools_some_are_offered() -> None:
    found = of(*(offered(f"t{n}") for n in range(MAX_TOOLS + 5)))
    assert len(found) == MAX_TOOLS


def test_only_the_named_tools_are_offered() -> None:
    assert [one.name for one in of(offered("a"), offered("b"), only=["b"])] == ["b"]


def test_a_pinned_tool_that_reads_differently_is_not_offered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (one,) = of(offered())
    assert of(offered(), pinned={"count": one.digest}) == (one,)
    assert of(offered(description="Delete."), pinned={"count": one.digest}) == ()
    assert "is pinned; review it" in caplog.text


def test_the_digest_changes_with_whatever_a_model_is_sent() -> None:
    told = [
        offered(),
        offered("counted"),
        offered(description="Count!"),
        offered(input_schema={**SCHEMA, "required": []}),
    ]
    assert len({of(one)[0].digest for one in told}) == len(told)


def test_a_servers_hints_count_only_where_the_user_says_so() -> None:
    hints = ToolAnnotations(read_only_hint=True, idempotent_hint=True)
    (doubted,) = of(offered(annotations=hints))
    (trusted,) = of(offered(annotations=hints), trust_annotations=True)
    assert (doubted.read_only, doubted.idempotent) == (False, False)
    assert (trusted.read_only, trusted.idempotent) == (True, True)


def test_the_user_may_say_which_tools_can_run_again() -> None:
    counts, reads = of(offered("a"), offered("b"), idempotent=["a"], read_only=["b"])
    assert (counts.read_only, counts.idempotent) == (False, True)
    assert (reads.read_only, reads.idempotent) == (True, True)


def test_a_listing_has_a_budget_for_all_of_its_tools(caplog: pytest.LogCaptureFixture) -> None:
    """Each of these tools alone could be offered."""
    large = {"type": "object", "description": "x" * 60_000}
    kept = of(*(offered(f"p{n:02}", input_schema=large) for n in range(20)))
    assert [one.name for one in kept] == [f"p{n:02}" for n in range(17)]
    assert "all tools together would have more than" in caplog.text


def test_a_schema_that_takes_for_ever_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    again = {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)}
    schema = {"type": "object", "$defs": {**again, "a40": {}}, "$ref": "#/$defs/a0"}
    assert [one.name for one in of(offered("fine"), offered(input_schema=schema))] == ["fine"]
    assert "takes too long" in caplog.text


def test_a_listing_that_takes_for_ever_ends_with_its_allowance(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = mcp_server("s", command=["x"])
    assert definitions(server, [offered("a"), offered("b")], seconds=0.0) == ()
    assert "tool 'a' and those after it are not offered" in caplog.text
