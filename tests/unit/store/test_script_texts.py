"""The texts of the scripts, as they are put together."""

import re

import pytest

from stepfleet.orchestrator.store import lua
from stepfleet.orchestrator.store.runs import steps


@pytest.mark.parametrize("name", sorted(lua.scripts()))
def test_whatever_seldom_calls_is_in_it(name: str) -> None:
    text = lua.source(name)
    found = re.search(r"^function seldom.*?^return \(\{.*?^end$", text, re.MULTILINE | re.DOTALL)
    inside = set(re.findall(r"^local function (\w+)", found[0], re.MULTILINE)) if found else set()
    called = set(re.findall(r"seldom\('(\w+)'", text))
    assert called <= inside
    assert bool(called) == bool(found)


def test_what_a_step_seldom_needs_is_not_built_by_its_scripts() -> None:
    for name in ("claim", "journal", "commit"):
        usual = re.sub(
            r"^function seldom.*?^return", "", lua.source(name), flags=re.DOTALL | re.MULTILINE
        )
        assert "function note_lost" in lua.source(name)
        assert "function note_lost" not in usual


def test_a_claim_returns_the_fields_that_the_store_reads() -> None:
    text = lua.source("claim")
    read = re.search(r"function read_header\(\)\n(.*?)^end", text, re.MULTILINE | re.DOTALL)
    places = re.search(r"OF_CALLER, STARTED = (\d+), (\d+)", text)
    assert read
    assert places
    names = re.findall(r"'(\w+)'", read[1])[1:]  # the first one is the command
    assert tuple(names[int(places[1]) - 1 :]) == steps._HEADER
    assert names[int(places[2]) - 1] == "execution_started"
