"""The alerts for Prometheus: sound rules that fire when they should, and the page names them."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from stepfleet.orchestrator import ModelErrorCode
from stepfleet.orchestrator.records.errors import ErrorType
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.run.results import end_state

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "deploy" / "alerts.yaml"
TESTS = Path(__file__).with_name("alerts.test.yaml")
RULES: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["groups"][0]["rules"]


def promtool(*arguments: str | Path) -> str:
    """Return what Prometheus's tool says; fail where it finds anything."""
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_the_rules() -> None:
    """OPS-06"""
    assert f"{len(RULES)} rules found" in promtool("check", "rules", FILE)


def test_each_alert_fires_in_its_trouble_and_none_in_a_healthy_fleet() -> None:
    """OPS-06: by Prometheus's own tests of rules."""
    groups = yaml.safe_load(TESTS.read_text())["tests"]
    samples = (one["exp_samples"] for group in groups for one in group["promql_expr_test"])
    fires = set(re.findall(r'alertname="(\w+)"', str([*samples])))
    assert fires == {rule["alert"] for rule in RULES}
    promtool("test", "rules", TESTS)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"page", "ticket"}
    assert rule["annotations"]["fix"]
    by = {one for found in re.findall(r"by \(([^)]*)\)", rule["expr"]) for one in found.split(", ")}
    assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= by


def test_alerts_compare_with_values_that_labels_can_have() -> None:
    text = " ".join(rule["expr"] for rule in RULES)
    (codes,) = re.findall(r'code=~"([^"]+)"', text)
    assert set(codes.split("|")) <= {one.value for one in ModelErrorCode}
    (status,) = re.findall(r'status="(\w+)"', text)
    assert status in {end_state(one).value for one in StopReason}
    (kind,) = re.findall(r'type="(\w+)"', text)
    assert kind in {one.value for one in ErrorType}


def test_the_page_explains_each_alert() -> None:
    page = (ROOT / "docs" / "how-to" / "alerts.md").read_text()
    table = re.findall(r"^\| `(Stepfleet\w+)` \|", page, re.MULTILINE)
    assert table == [rule["alert"] for rule in RULES]
