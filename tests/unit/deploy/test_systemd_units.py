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
EXPOSURE = 2.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units in a folder of their own, with the program where it is here."""
    folder = tmp_path_factory.mktemp("units") / "system"
    shutil.copytree(UNITS, folder)
    program = str(Path(sys.executable).with_name("stepfleet"))
    for file in folder.glob("*.service"):
        text = file.read_text()
        assert "/opt/stepfleet/bin/stepfleet " in text
        file.write_text(text.replace("/opt/stepfleet/bin/stepfleet", program))
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


def unit(name: str) -> ConfigParser:
    """Return what a unit says, the common part included; of names said twice the last."""
    read = ConfigParser(strict=False, interpolation=None)
    read.optionxform = str  # type: ignore[assignment,method-assign]
    read.read([UNITS / "stepfleet-.service.d" / "common.conf", UNITS / name])
    return read


def test_systemd_finds_no_fault_with_the_units(installed: Path) -> None:
    """OPS-06"""
    told = analyzed(installed, "verify", *(f"./{name}" for name in (*SERVICES, "stepfleet.target")))
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
    for file in UNITS.glob("*.service"):
        said = unit(file.name)
        assert said["Unit"]["PartOf"] == "stepfleet.target"
        assert said["Install"]["WantedBy"] == "stepfleet.target"
