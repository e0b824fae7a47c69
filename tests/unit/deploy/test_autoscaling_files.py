"""The files for autoscalers name what there is: a field, one Deployment, one metric."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from stepfleet.orchestrator import Settings
from stepfleet.orchestrator.store.fleet.scale import ScaleSignal

FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "autoscaling"
STEPS = Settings().queue


def loaded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return found


def trigger(name: str) -> dict[str, str]:
    (one,) = loaded(name)["spec"]["triggers"]
    metadata: dict[str, str] = one["metadata"]
    return metadata


def test_keda_reads_a_field_of_the_keepers_answer() -> None:
    """OPS-02: numbers in KEDA's metadata are text."""
    metadata = trigger("keda.yaml")
    assert metadata["valueLocation"] in ScaleSignal.model_fields
    address = urlsplit(metadata["url"])
    assert (address.path, parse_qs(address.query)) == ("/scale", {"queue": [STEPS]})
    assert metadata["targetValue"] == "1"


def test_a_signal_that_cannot_be_read_changes_nothing() -> None:
    """OPS-02: KEDA keeps the number then, unless a fallback gives one, or no metric means 0."""
    for name in ("keda.yaml", "keda-prometheus.yaml"):
        assert "fallback" not in loaded(name)["spec"]
    assert trigger("keda-prometheus.yaml")["ignoreNullValues"] == "false"


def test_all_scale_by_one_metric_of_one_queue() -> None:
    """OPS-02: each worker shows the whole fleet, so none adds it up."""
    query, adapter = trigger("keda-prometheus.yaml")["query"], loaded("prometheus-adapter.yaml")
    (rule,) = adapter["rules"]["external"]
    (metric,) = loaded("hpa.yaml")["spec"]["metrics"]
    external = metric["external"]
    asked = re.fullmatch(rf'max\(stepfleet_work{{job="(\w+)", queue="{STEPS}"}}\)', query)
    assert asked is not None
    assert rule["seriesQuery"].startswith("stepfleet_work{")
    assert rule["metricsQuery"].startswith("max(")
    assert rule["metricsQuery"].endswith(" by (job, queue)")
    assert rule["name"]["as"] == external["metric"]["name"] == "stepfleet_work"
    assert external["metric"]["selector"]["matchLabels"] == {"job": asked[1], "queue": STEPS}
    slots = str(Settings().slots)
    assert external["target"] == {"type": "AverageValue", "averageValue": slots}
    assert trigger("keda-prometheus.yaml")["threshold"] == slots


@pytest.mark.parametrize("name", ["keda.yaml", "keda-prometheus.yaml", "hpa.yaml"])
def test_the_files_scale_one_deployment(name: str) -> None:
    """OPS-02"""
    assert loaded(name)["spec"]["scaleTargetRef"]["name"] == "stepfleet-worker"


def test_the_page_names_every_file() -> None:
    """OPS-02"""
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    names = {one.name for one in FOLDER.iterdir()} - {"README.md"}
    assert set(re.findall(r"\]\(([\w.-]+)\)", page)) == names
