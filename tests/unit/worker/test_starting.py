"""A worker that has loaded its app collects garbage again."""

import os
import subprocess
import sys
from pathlib import Path


def test_a_worker_that_is_loaded_collects_garbage_and_leaves_out_what_stays(
    tmp_path: Path,
) -> None:
    probe = (
        "import atexit, gc, runpy, sys\n"
        "atexit.register(lambda: print(gc.isenabled(), gc.get_freeze_count() > 100_000))\n"
        "sys.argv = ['worker', '--help']\n"
        "runpy.run_module('stepfleet.worker', run_name='__main__')"
    )
    command = [sys.executable, "-c", probe]
    env = {**os.environ, "STEPFLEET_REDIS_URL": "redis://localhost:1/0"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )

    assert "Usage: python -m stepfleet.worker" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "True True"
