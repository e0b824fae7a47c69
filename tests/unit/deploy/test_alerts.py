"""The alerts for Prometheus name metrics and labels that workers have, and the page names them."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Histogram

from stepfleet.orchestrator import ModelErrorCode
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.run.results import end_state
from stepfleet.worker.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parents[3]
RULES: list[dict[str, Any]] = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())[
    "groups"
][0]["rules"]
FUNCTIONS = {"absent", "max", "sum", "by", "rate", "increase", "histogram_quantile", "or"}
PROMETHEUS_LABELS = {"job", "instance"}


def served() -> dict[str, set[str]]:
    """Return the names of all samples that workers serve, each with its labels."""
    metrics = Metrics()
    found: dict[str, set[str]] = {}
    for collector in vars(metrics).values():
        for one in collector.values() if isinstance(collector, dict) else (collector,):
            labels = set(getattr(one, "_labelnames", ()))
            for family in getattr(one, "describe", list)():
                ends = {"counter": ("_total",), "histogram": ("_bucket",)}.get(family.type, ("",))
                also = {"le"} if isinstance(one, Histogram) else set()
                found |= {f"{family.name}{end}": labels | also for end in ends}
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_names_metrics_and_labels_that_workers_have(rule: dict[str, Any]) -> None:
    expression = rule["expr"]
    plain = re.sub(r'"[^"]*"|\[\w+\]', "", expression)
    assert plain.count("(") == plain.count(")")
    names = set(re.findall(r"\b[a-z][a-z_]*\b", re.sub(r"\{[^}]*\}|by \([^)]*\)", "", plain)))
    metrics = served()
    used = names - FUNCTIONS
    assert used
    assert used <= set(metrics), used - set(metrics)
    labels = set(re.findall(r"(\w+)=", plain))
    labels |= {one for by in re.findall(r"by \(([^)]*)\)", plain) for one in by.split(", ")}
    assert labels <= PROMETHEUS_LABELS.union(*(metrics[one] for one in used))
    shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert shown <= labels
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
    assert rule["labels"]["severity"] in {"page", "ticket"}
    assert rule["annotations"]["fix"]


def test_alerts_compare_with_values_that_labels_can_have() -> None:
    text = " ".join(rule["expr"] for rule in RULES)
    (codes,) = re.findall(r'code=~"([^"]+)"', text)
    assert set(codes.split("|")) <= {one.value for one in ModelErrorCode}
    (status,) = re.findall(r'status="(\w+)"', text)
    assert status in {end_state(one).value for one in StopReason}


def test_the_page_explains_each_alert() -> None:
    page = (ROOT / "docs" / "how-to" / "alerts.md").read_text()
    table = re.findall(r"^\| `(Stepfleet\w+)` \|", page, re.MULTILINE)
    assert table == [rule["alert"] for rule in RULES]
