"""The dashboard's file: panels that can be read, side by side, with every metric of the docs."""

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import orjson
import pytest

ROOT = Path(__file__).resolve().parents[3]
BOARD: dict[str, Any] = orjson.loads((ROOT / "deploy/grafana/stepfleet.json").read_bytes())
PANELS = [one for one in BOARD["panels"] if one["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
PAGE = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
METRIC = re.compile(r"\b(?:stepfleet|process)_\w+")
WIDTH = 24
UNITS = {"short", "ops", "s", "percentunit", "currencyUSD", "bytes", "bool_yes_no"}


def plain(names: list[str]) -> set[str]:
    """Return the names of metrics as the page has them: a histogram is one."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def test_every_metric_of_docs_and_alerts_is_on_the_dashboard_and_no_other() -> None:
    """OPS-06"""
    shown = plain(METRIC.findall(" ".join(QUERIES)))
    table = PAGE.partition("| metric |")[2].partition("\n\n")[0]
    told = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    assert {one for one in shown if one.startswith("stepfleet_")} == told
    alerts = (ROOT / "deploy" / "alerts.yaml").read_text(encoding="utf-8")
    expressions = re.findall(r"expr: (.*?)\n        (?:for|labels):", alerts, re.DOTALL)
    assert plain(METRIC.findall(" ".join(expressions))) <= shown


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_can_be_read(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for target in panel["targets"]:
        assert 'job="$job"' in target["expr"]
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        # Legends tell apart what a query keeps apart; all series of a panel are of one job.
        by = re.findall(r"by \(([^)]*)\)", target["expr"])
        kept = {one for found in by for one in found.split(", ")} - {"job", "le"}
        assert shown == (kept if by else {"instance"})


def test_the_panels_have_places_of_their_own() -> None:
    places = [one["gridPos"] for one in BOARD["panels"]]
    assert all(one["x"] + one["w"] <= WIDTH for one in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
    assert len({one["id"] for one in BOARD["panels"]}) == len(places)
    assert len({one["title"] for one in PANELS}) == len(PANELS)


def test_the_variables_are_those_that_queries_use() -> None:
    defined = {one["name"] for one in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", " ".join(QUERIES))) - {"__rate_interval"}
    assert defined == used | {"datasource"}
