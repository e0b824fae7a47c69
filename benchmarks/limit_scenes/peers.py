"""The same calls by systems that keep limits within one process: Inspect and LiteLLM's router.

Each does the same runs of five calls before the same service, in an environment of its own that is
made once (see peers_environments.py). The router knows the limit, Inspect's adaptive connections
find it. Who needs longer than `--peer-seconds` is ended; its figures are those of that time.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers_catalog import Environment
from peers_environments import default_cache, python_of, versions
from processes import HERE, ended, model

from limit_scenes.service_log import BURST, calls_of, figures

INSPECT = Environment("inspect", ("inspect-ai", "openai>=3.4"), ("inspect-ai", "openai"))
LITELLM = Environment("litellm", ("litellm", "mcp"), ("litellm", "openai"))
LEAST = 20
"""Calls below which there are no figures: it did not work at all."""
PEERS = {
    "inspect": ("inspect_task.py", INSPECT),
    "litellm": ("litellm_router.py", LITELLM),
}


def measure(
    name: str, runs: int, turns: int, rpm: float, latency: str, most: float
) -> dict[str, Any]:
    """Measure one peer. What cannot be installed has a row that says why."""
    script, environment = PEERS[name]
    row: dict[str, Any] = {"scene": "peers", "what": name, "runs": runs}
    try:
        python = python_of(environment, default_cache())
    except (LookupError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"{name} is left out: {error}\n")
        return row | {"ended": "not installed"}
    with tempfile.TemporaryDirectory(prefix="sf-limits-") as folder:
        log = Path(folder) / "calls.jsonl"
        service = (f"--rpm={rpm:g}", f"--burst={BURST:g}")
        with model(latency, log, options=service) as served:
            job = {"runs": runs, "turns": turns, "model": served.url, "folder": folder, "rpm": rpm}
            started = time.monotonic()
            done = _run([python, str(HERE / "peers" / script), json.dumps(job)], folder, most)
            seconds = time.monotonic() - started
        calls = calls_of(log)
        admitted = sum(not call.refused for call in calls)
        found = figures(calls, rpm) if admitted > LEAST else {}
    known = versions(environment, python)
    return row | {"ended": done, "seconds": seconds, **found, "versions": known}


def _run(command: list[str], folder: str, most: float) -> str:
    given = {"OPENAI_API_KEY": "none", "HOME": folder, "PATH": os.environ.get("PATH", "")}
    log = Path(folder) / "peer.log"
    with (
        log.open("w", encoding="utf-8") as output,
        ended(
            subprocess.Popen(
                command, cwd=folder, env=given, stdout=output, stderr=subprocess.STDOUT, text=True
            )
        ) as process,
    ):
        try:
            code = process.wait(timeout=most)
        except subprocess.TimeoutExpired:
            return f"no, {most:g} s"
    if code:
        sys.stderr.write(log.read_text(encoding="utf-8")[-2000:])
    return "yes" if code == 0 else f"exit {code}"
