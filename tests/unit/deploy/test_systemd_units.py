"""The units as systemd itself reads them: valid, hardened, and with time to drain."""

import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from support.manifests import ROOT, seconds

from stepfleet.orchestrator import Settings

UNITS = ROOT / "deploy" / "systemd"
SERVICES = ("stepfleet-worker@1.service", "stepfleet-keeper.service", "stepfleet-flower.service")
OTHERS = ("stepfleet-scale.service", "stepfleet-scale.timer", "stepfleet.target")
EXPOSURE = 2.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units in a folder of their own, with the program where it is here."""
    folder = tmp_path_factory.mktemp("units") / "system"
    shutil.copytree(UNITS, folder)
    programs = {
        "/opt/stepfleet/bin/stepfleet ": Path(sys.executable).with_name("stepfleet"),
        "/opt/stepfleet/bin/scale-units\n": ROOT / "deploy" / "autoscaling" / "scale-units",
    }
    for file in folder.glob("*.service"):
        text = file.read_text()
        (named,) = (each for each in programs if f"ExecStart={each}" in text)
        file.write_text(text.replace(named, f"{programs[named]}{named[-1]}"))
    return folder


def analyzed(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "SYSTEMD_UNIT_PATH": f"{folder}:", "LC_ALL": "C.UTF-8"},
    )


def unit(name: str, *, with_common: bool = True) -> ConfigParser:
    """Return what a unit says, with the common part or without; of names said twice the last."""
    read = ConfigParser(strict=False, interpolation=None)
    read.optionxform = str  # type: ignore[assignment,method-assign]
    common = [UNITS / "stepfleet-.service.d" / "common.conf"] if with_common else []
    read.read([*common, UNITS / name])
    return read


def test_systemd_finds_no_fault_with_the_units(installed: Path) -> None:
    """OPS-06"""
    told = analyzed(installed, "verify", *(f"./{name}" for name in (*SERVICES, *OTHERS)))
    assert (told.returncode, told.stdout, told.stderr) == (0, "", "")


@pytest.mark.parametrize("name", SERVICES)
def test_a_unit_has_few_rights(installed: Path, name: str) -> None:
    """OPS-06: without the common part systemd says 9.6 of 10."""
    told = analyzed(installed, "security", "--offline=true", f"./{name}")
    level = re.search(r"exposure level for \S+: ([\d.]+)", told.stdout)
    assert level is not None, told.stderr
    assert float(level[1]) <= EXPOSURE


def test_a_worker_has_its_drain_and_fifteen_seconds_to_stop() -> None:
    """OPS-06"""
    service = unit("stepfleet-worker@.service")["Service"]
    assert seconds(service["TimeoutStopSec"]) == Settings.model_fields["drain"].default + 15
    assert service["KillSignal"] == "SIGTERM"
    assert service["Restart"] == "always"


def test_the_target_stops_and_starts_all_units() -> None:
    files = {file.name for file in UNITS.iterdir() if file.suffix in {".service", ".timer"}}
    for name in files - {"stepfleet-scale.service"}:  # its timer is
        said = unit(name)
        assert said["Unit"]["PartOf"] == "stepfleet.target"
        assert said["Install"]["WantedBy"] == "stepfleet.target"


def test_keys_of_models_are_for_workers_only() -> None:
    """OPS-06: and the file for them is made by the page."""
    readers = {file.name for file in UNITS.glob("*.service") if "worker.env" in file.read_text()}
    assert readers == {"stepfleet-worker@.service"}
    assert "API_KEY" in (UNITS / "worker.env.example").read_text()
    assert "API_KEY" not in (UNITS / "fleet.env.example").read_text()
    assert "/etc/stepfleet/worker.env" in (ROOT / "deploy" / "README.md").read_text()


def test_what_scales_may_start_units(installed: Path) -> None:
    """OPS-02: it has none of the common part, which names a user and restarts for ever."""
    common = UNITS / "stepfleet-.service.d" / "common.conf"
    assert (UNITS / "stepfleet-scale.service.d" / common.name).exists()
    told = analyzed(installed, "security", "--offline=true", "./stepfleet-scale.service")
    assert "Service runs as root user" in told.stdout, told.stderr
    service = unit("stepfleet-scale.service", with_common=False)["Service"]
    worker = unit("stepfleet-worker@.service")["Service"]
    assert service["Type"] == "oneshot"
    assert service["WorkingDirectory"] == worker["WorkingDirectory"]
    assert Path(service["ExecStart"]).parent == Path(worker["ExecStart"].split()[0]).parent
    text = (UNITS / "stepfleet-scale.service").read_text()
    assert "EnvironmentFile=/etc/stepfleet/fleet.env\n" in text


def test_the_page_installs_all_that_the_units_need() -> None:
    """OPS-06"""
    page = (ROOT / "deploy" / "README.md").read_text()
    block = page.partition("## systemd")[2].partition("```\n")[2].partition("```")[0]
    copied = {word.rpartition("*")[2] for word in block.split() if word.startswith("systemd/*")}
    there = {entry.suffix for entry in UNITS.iterdir()} - {".example"}
    assert copied == there
    assert "autoscaling/scale-units" in page
