"""The README's sample runs as it stands."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from support.workers.fleet_workers import FleetWorker

from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

README = Path(__file__).parents[3] / "README.md"


def clerk(request: RequestRecord) -> Reply:
    if request.turn == 1:
        return Reply(tool_calls=(ToolCallReply("stock", {"product": "lamp"}),))
    return Reply(f"There are {request.answers[0].content} lamps.")


def samples() -> list[str]:
    found: list[str] = re.findall(
        r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL
    )
    return found


def test_the_sample_of_a_test_passes(tmp_path: Path) -> None:
    """DOC-05"""
    shop, test = samples()
    (tmp_path / "shop.py").write_text(shop, encoding="utf-8")
    (tmp_path / "test_shop.py").write_text(test, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shop.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_first_sample_submits_a_batch_and_prints_its_results(
    tmp_path: Path,
    redis_url: str,
    model: ModelServer,
    start_worker: Callable[..., FleetWorker],
) -> None:
    """DOC-05"""
    sample, _ = samples()
    shop = tmp_path / "shop.py"
    shop.write_text(sample, encoding="utf-8")
    lines = [json.dumps({"id": str(n), "input": f"How many lamps, {n}?"}) for n in range(3)]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines), encoding="utf-8")
    model.follow(clerk)
    start_worker(env={"STEPFLEET_AGENTS": str(shop)})
    done = subprocess.run(
        [sys.executable, str(shop)],
        cwd=tmp_path,
        env={**os.environ, "STEPFLEET_REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["completed completed There are 12 lamps."] * 3
