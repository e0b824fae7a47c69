"""Manifests of Kubernetes as the real programs make them, and what schemas say of them."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "stepfleet"
EXAMPLES = ROOT / "deploy" / "helm" / "examples"
_CUSTOM = Path(__file__).with_name("crds")
_KUBERNETES = "1.37"

Manifest = dict[str, Any]


def program(name: str) -> str:
    """Return the path of `helm` or `kubectl`: of the package of the gate, else on PATH.

    The package has them in an archive, which is unpacked once beside the environment's programs.

    Raises:
        FileNotFoundError: Neither has it.
    """
    package = find_spec("aws_cdk")
    if package is None or not package.submodule_search_locations:
        if found := shutil.which(name):
            return found
        raise FileNotFoundError(f"{name} is not on PATH, and PyPI has it for Linux on x86-64 only")
    unpacked = Path(sys.prefix) / "share" / "stepfleet-gate" / name / name
    if not unpacked.exists():
        unpacked.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(next(iter(package.submodule_search_locations)))
        with tempfile.NamedTemporaryFile(dir=unpacked.parent, delete=False) as file:
            file.write(_layer(folder).read(f"{name}/{name}"))
        Path(file.name).chmod(0o755)
        Path(file.name).replace(unpacked)
    return str(unpacked)


def _layer(folder: Path) -> zipfile.ZipFile:
    (archive,) = folder.glob("lambda_layer_kubectl_*/_jsii/*.tgz")
    with tarfile.open(archive) as files:
        layer = files.extractfile("package/lib/layer.zip")
        assert layer is not None
        return zipfile.ZipFile(io.BytesIO(layer.read()))


def run(name: str, *words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program with a home of its own; returns whatever it ends with."""
    with tempfile.TemporaryDirectory() as home:
        return subprocess.run(
            [program(name), *words],
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
            env={"PATH": os.environ["PATH"], "HOME": home},
        )


def helm_template(*words: str, values: dict[str, Any] | None = None) -> str:
    """Return what `helm template` prints for the release `fleet` in the namespace `agents`."""
    made = helm_run("template", "fleet", str(CHART), "-n", "agents", *words, values=values)
    assert made.returncode == 0, made.stderr
    return made.stdout


def helm_run(*words: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm with values on its standard input."""
    more = () if values is None else ("-f", "-")
    return run("helm", *words, *more, given=None if values is None else json.dumps(values))


def manifests(text: str) -> list[Manifest]:
    """Return the documents of a YAML file that are not empty."""
    return [one for one in yaml.safe_load_all(text) if one]


@cache
def example(name: str) -> list[Manifest]:
    """Return the manifests of a file of values in `deploy/helm/examples`."""
    return manifests(helm_template("-f", str(EXAMPLES / f"{name}.yaml")))


def one(made: list[Manifest], kind: str, name: str = "") -> Manifest:
    """Return the only manifest of a kind whose name ends so."""
    (found,) = (
        each for each in made if each["kind"] == kind and each["metadata"]["name"].endswith(name)
    )
    return found


def pods(made: list[Manifest]) -> dict[str, Manifest]:
    """Return the specs of pods by the names of what makes them."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in made
        if each["kind"] in {"Deployment", "StatefulSet"}
    }


def environment(pod: Manifest) -> dict[str, Any]:
    """Return the variables of a pod's only container: values, or where they come from."""
    (container,) = pod["containers"]
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def check_schema(manifest: Manifest) -> None:
    """Raise where a manifest is not as Kubernetes, or the project of its kind, has it."""
    custom = _CUSTOM / f"{manifest['kind']}.json"
    if custom.exists():
        jsonschema.validate(manifest, json.loads(custom.read_text()))
    else:
        kubernetes_validate.validate(manifest, _KUBERNETES, strict=True)


def breaches(pod: Manifest) -> list[str]:
    """Return what the Pod Security Standard "restricted" forbids in a pod, but for volumes."""
    told = pod.get("securityContext", {})
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        own = {**told, **container.get("securityContext", {})}
        asked = {
            "runAsNonRoot": own.get("runAsNonRoot") is True,
            "runAsUser": own.get("runAsUser") != 0,
            "seccompProfile": own.get("seccompProfile", {}).get("type")
            in {"RuntimeDefault", "Localhost"},
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "capabilities": own.get("capabilities") == {"drop": ["ALL"]},
            "hostPort": not any("hostPort" in port for port in container.get("ports", [])),
        }
        found += [f"{container['name']}: {name}" for name, holds in asked.items() if not holds]
    return found


def seconds(duration: str) -> int:
    """Return the seconds of `90s`, `2min`, `1m`, `75`."""
    number, unit = re.fullmatch(r"(\d+)(s|m|min|)", duration).groups()  # type: ignore[union-attr]
    return int(number) * (60 if unit.startswith("m") else 1)
