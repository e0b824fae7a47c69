"""The commands of docs/tutorial.md do what the page says, with a tenth of its runs."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from support.deadlines import wait_until
from support.documents.documents import DOCS, blocks_of, files_of
from support.servers.redis_servers import short_folder

BLOCKS = blocks_of((DOCS / "tutorial.md").read_text(encoding="utf-8"))
FILES = files_of([one for one in BLOCKS if one.language == "python"])
COMMANDS = [one for one in BLOCKS if one.info == "bash"]
QUICK = {"STEPFLEET_LEASE": "3", "STEPFLEET_GRACE": "1", "STEPFLEET_DRAIN": "3"}
KEPT = ("HOME", "LANG", "TMPDIR")
SMALLER = {"range(1000)": "range(100)", "latency 2-6": "latency 1-1.5", "slots 100": "slots 8"}


class Terminals:
    """A folder, a fleet in the first terminal, and commands in the second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            **{one: os.environ[one] for one in KEPT if one in os.environ},
            **QUICK,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "200",
        }
        self.up: subprocess.Popen[str] | None = None
        self.log: TextIO | None = None

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(smaller(text), encoding="utf-8")

    def start(self, command: str) -> None:
        """Run `stepfleet up` as the page has it, until it is ready."""
        self.log = (self.folder / "up.log").open("w", encoding="utf-8")
        words = smaller(command).split()
        self.up = subprocess.Popen(
            words, cwd=self.folder, env=self.env, stdout=self.log, stderr=self.log, text=True
        )
        wait_until(self.has_two_workers, within=100, what="two workers")

    def has_two_workers(self) -> bool:
        """Return whether the workers are up, as they are when a reader has opened a terminal."""
        printed = (self.folder / "up.log").read_text(encoding="utf-8")
        return "2 worker(s) with clerk" in printed and len(self.alive()) >= 2

    def alive(self) -> list[str]:
        """Return the process ids of the workers that `status` shows as alive."""
        workers = json.loads(self.run("stepfleet status --json"))["fleet"]["workers"]
        return [one["process"].rpartition(":")[2] for one in workers if one["alive"]]

    def stop(self) -> None:
        """Press Ctrl-C in the first terminal."""
        if self.up is not None and self.log is not None:
            self.up.send_signal(signal.SIGINT)
            self.up.wait(60)
            self.up = self.log.close()

    def run(self, commands: str) -> str:
        """Run commands in the second terminal, which keeps its variables; return their output."""
        keep = "declare -p BATCH STEPFLEET_REDIS_URL > .variables 2>/dev/null || true"
        done = subprocess.run(
            ["bash", "-ec", f". ./.variables 2>/dev/null || true\n{commands}\n{keep}"],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode <= 1, done.stdout + done.stderr  # 1: some runs failed
        return done.stdout


def smaller(text: str) -> str:
    """Return the text with a tenth of the runs, and a test's patience."""
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    return text


@pytest.fixture
def terminals() -> Iterator[Terminals]:
    with short_folder() as folder:
        both = Terminals(folder)
        yield both
        both.stop()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_newcomer_gets_through_the_tutorial(terminals: Terminals) -> None:
    """DOC-05: a worker is killed in the middle, a fault is found and mended, nothing is lost."""
    for name, text in FILES.items():
        terminals.write(name, text)
    (prices,) = (one.text for one in BLOCKS if one.is_fragment)
    outputs: dict[str, str] = {}
    run_id = ""
    for block in COMMANDS:
        if block.text.startswith("stepfleet up"):
            if terminals.up is not None:
                terminals.stop()
                mended = re.sub(r"^PRICES = .*\n", prices, FILES["agents.py"], flags=re.MULTILINE)
                terminals.write("agents.py", mended)
            terminals.start(block.text)
            continue
        pid = terminals.alive()[0] if "PID" in block.text else ""
        printed = terminals.run(block.text.replace("PID", pid).replace("RUN", run_id))
        outputs[block.text] = printed
        if found := re.search(r"e\.g\. line (\S+), run ", printed):
            run_id = found[1]
    check(outputs, terminals)


def check(outputs: dict[str, str], terminals: Terminals) -> None:
    watched, mended = (text for command, text in outputs.items() if "watch" in command)
    assert re.search(r"completed +│ +90 │", watched)
    assert re.search(r"failed +│ +10 │", watched)
    (failures,) = (text for command, text in outputs.items() if "failures" in command)
    assert "     10  tool 'price': KeyError: '…'" in failures
    (explained,) = (text for command, text in outputs.items() if "explain" in command)
    assert re.search(r"^→ +ErrorPolicyCriterion", explained, re.MULTILINE)
    assert re.search(r"completed +│ +100 │", mended)
    (read,) = (text for command, text in outputs.items() if "read.py" in command)
    assert read.splitlines()[2].startswith("question-0099 completed 3 sofas cost 900 euros.")
    assert len((terminals.folder / "results.jsonl").read_text("utf-8").splitlines()) == 100


def test_the_page_shows_what_the_test_of_it_replaces() -> None:
    text = "".join(one.text for one in BLOCKS)
    assert all(one in text for one in SMALLER)
