"""The plain manifests are the chart's, and kustomize makes valid ones of them."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import manifests
from support.manifests import CHART, ROOT, Manifest, one, pods

PLAIN = ROOT / "deploy" / "kubernetes"


@pytest.fixture(scope="module")
def overlay() -> list[Manifest]:
    built = manifests.run("kubectl", "kustomize", str(PLAIN / "overlays" / "keda"))
    assert built.returncode == 0, built.stderr
    return manifests.manifests(built.stdout)


def test_the_manifests_are_what_the_page_says_makes_them() -> None:
    """OPS-01: chart and manifests do not drift."""
    page = (PLAIN / "README.md").read_text()
    (command,) = (line for line in page.splitlines() if line.startswith("helm template"))
    words, _, file = command.removeprefix("helm ").partition(" > ")
    assert (ROOT / file) == PLAIN / "base" / "stepfleet.yaml"
    told = [str(ROOT / word) if word.startswith("deploy/") else word for word in words.split()]
    made = manifests.helm_run(*told)
    assert made.returncode == 0, made.stderr
    assert (ROOT / file).read_text() == made.stdout, f"make it again: {command}"


def test_what_kustomize_builds_fits_the_schemas(overlay: list[Manifest]) -> None:
    """OPS-01"""
    kinds = {each["kind"] for each in overlay}
    assert kinds >= {"Deployment", "Service", "NetworkPolicy", "ScaledObject"}
    for each in overlay:
        manifests.check_schema(each)
        assert each["metadata"]["namespace"] == "agents"
        assert "Helm" not in each["metadata"].get("labels", {}).values()
    for pod in pods(overlay).values():
        assert manifests.breaches(pod) == []


def test_the_overlay_leaves_the_number_of_workers_to_keda(overlay: list[Manifest]) -> None:
    worker = one(overlay, "Deployment", "-worker-default")
    assert "replicas" not in worker["spec"]
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example.com/my-fleet:1"


def test_the_overlays_scaler_is_the_charts(overlay: list[Manifest]) -> None:
    """OPS-01, OPS-02"""
    values: dict[str, Any] = yaml.safe_load((PLAIN / "values.yaml").read_text())
    values["workers"] = {"default": {"autoscaling": {"max": 20}}}
    made = manifests.helm_run("template", "stepfleet", str(CHART), "-n", "agents", values=values)
    charts = one(manifests.manifests(made.stdout), "ScaledObject")
    assert one(overlay, "ScaledObject")["spec"] == charts["spec"]


def test_the_namespace_is_changed_in_one_line(tmp_path: Path) -> None:
    """OPS-01: KEDA's address of the keeper follows."""
    shutil.copytree(PLAIN, tmp_path / "plain")
    file = tmp_path / "plain" / "overlays" / "keda" / "kustomization.yaml"
    file.write_text(file.read_text().replace("namespace: agents", "namespace: other"))
    built = manifests.run("kubectl", "kustomize", str(file.parent))
    assert built.returncode == 0, built.stderr
    made = manifests.manifests(built.stdout)
    assert {each["metadata"]["namespace"] for each in made} == {"other"}
    (trigger,) = one(made, "ScaledObject")["spec"]["triggers"]
    assert trigger["metadata"]["url"] == "http://stepfleet-keeper.other.svc:9460/scale"


def test_the_page_makes_every_secret_that_the_manifests_name(overlay: list[Manifest]) -> None:
    """OPS-01"""
    containers = [pod["containers"][0] for pod in pods(overlay).values()]
    named = {source["secretRef"]["name"] for one in containers for source in one.get("envFrom", [])}
    named |= {
        each["valueFrom"]["secretKeyRef"]["name"]
        for container in containers
        for each in container["env"]
        if "valueFrom" in each
    }
    page = (PLAIN / "README.md").read_text()
    made = re.findall(r"^kubectl .*create secret generic (\S+)", page, re.MULTILINE)
    assert set(made) == named
    assert len(made) == 3
