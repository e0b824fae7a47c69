"""The names under which a model sees servers' tools."""

import re

from hypothesis import given
from hypothesis import strategies as st

from stepfleet.worker.toolbox.mcp.registry import offered_names


def test_a_name_that_nobody_else_has_stays_as_it_is() -> None:
    assert offered_names([("files", "read")], taken=["write"]) == {"read": ("files", "read")}


def test_a_name_of_the_agents_own_tools_gets_the_servers_in_front() -> None:
    assert offered_names([("files", "read")], taken=["read"]) == {"files__read": ("files", "read")}


def test_two_servers_with_one_name_are_both_told_apart() -> None:
    names = offered_names([("a", "read"), ("b", "read"), ("b", "write")], taken=[])
    assert list(names) == ["a__read", "b__read", "write"]


def test_every_tool_of_a_server_with_prefix_has_its_name_in_front() -> None:
    names = offered_names([("a", "read"), ("b", "read")], taken=[], prefixed=["a"])
    assert list(names) == ["a__read", "read"]


def test_what_providers_refuse_becomes_an_underscore() -> None:
    names = offered_names([("a", "get.it/now")], taken=[])
    assert names == {"get_it_now": ("a", "get.it/now")}


def test_names_that_only_differ_in_what_is_refused_stay_apart() -> None:
    names = offered_names([("a", "x.y"), ("a", "x/y")], taken=[])
    assert sorted(names.values()) == [("a", "x.y"), ("a", "x/y")]


def test_a_long_name_is_cut_and_told_apart_by_a_digest() -> None:
    first, second = offered_names([("a", "x" * 80 + "1"), ("a", "x" * 80 + "2")], taken=[])
    assert first != second
    assert len(first) == len(second) == 64


TOOLS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c-3"]), st.text(min_size=1, max_size=90)), unique=True
)


@given(TOOLS, st.lists(st.text(min_size=1, max_size=10)))
def test_every_tool_has_one_name_that_providers_take(
    tools: list[tuple[str, str]], taken: list[str]
) -> None:
    names = offered_names(tools, taken)
    assert sorted(names.values()) == sorted(tools)
    assert not set(names) & set(taken)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) for name in names)
