"""A `Fleet` that was made, or is in use, before its process is forked: it works on both sides."""

import os
import select
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from support.deadlines import wait_until
from support.workers.celery_worker import CeleryWorker
from support.workers.toy_worker import client_app

from stepfleet.orchestrator import Agent, Fleet

LONG = 60.0
PLAIN = Agent("plain", model="openai:any")


def in_child(work: Callable[[], str]) -> str:
    """Return what `work` returns in a forked child; fail where the child says nothing."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = work()
        except BaseException:  # noqa: BLE001 - it has to be told to the parent
            said = traceback.format_exc()
        with suppress(BaseException):
            os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], LONG)
        if not ready:
            os.kill(child, 9)
        assert ready, "the child hangs"
        return os.read(reader, 65536).decode()
    finally:
        os.close(reader)
        os.waitpid(child, 0)


def ids(redis_url: str) -> set[str]:
    """Return the ids of all connections but the one that asks."""
    with redis.Redis.from_url(redis_url) as client:
        return {one["id"] for one in client.client_list()} - {str(client.client_id())}


@pytest.mark.parametrize("used", [False, True])
def test_a_fleet_that_was_made_before_a_fork_works_in_the_child_and_the_parent(
    redis_url: str, *, used: bool
) -> None:
    with Fleet(redis_url) as fleet:
        before = fleet.submit(PLAIN, "before") if used else None
        theirs = in_child(lambda: fleet.submit(PLAIN, "in the child"))
        mine = fleet.submit(PLAIN, "in the parent")
        ids = [one for one in (before, theirs, mine) if one]
        assert [fleet.runs.show(one).run_id for one in ids] == ids
        assert in_child(lambda: fleet.runs.show(theirs).run_id) == theirs


def test_a_fleet_that_is_in_use_when_its_process_is_forked_works_on_both_sides(
    redis_url: str,
) -> None:
    """Also for the call under way, which is the parent's alone."""
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(PLAIN, "waits for a worker")
        calling, failures = threading.Event(), []

        def wait() -> None:
            calling.set()
            try:
                fleet.runs.wait(run_id, timeout=LONG)
            except BaseException as error:  # noqa: BLE001 - looked at below
                failures.append(error)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        assert calling.wait(LONG)
        for n in range(5):
            assert in_child(lambda: fleet.runs.show(run_id).run_id) == run_id
            fleet.submit(PLAIN, f"question {n}")
        fleet.runs.cancel(run_id)
        waiting.join(LONG)
        assert not waiting.is_alive()
        assert failures == []


def test_a_child_shares_no_connection_with_its_parent(redis_url: str) -> None:
    """What the parent closes is closed: no copy of a socket lives on in the child."""
    release, held = os.pipe()
    others = ids(redis_url)  # of tests before this one
    fleet = Fleet(redis_url)
    fleet.submit(PLAIN, "before")
    own = ids(redis_url) - others
    assert own
    child = os.fork()
    if child == 0:
        os.close(held)
        os.read(release, 1)
        os._exit(0)
    try:
        fleet.close()
        wait_until(lambda: not own & ids(redis_url), within=LONG, what="the end of the connections")
    finally:
        os.close(held)
        os.close(release)
        os.waitpid(child, 0)


def test_a_batch_is_read_on_both_sides_of_a_fork(redis_url: str) -> None:
    with Fleet(redis_url) as fleet:
        batch = fleet.submit_batch([{"input": "one"}, {"input": "two"}], agent=PLAIN)
        assert in_child(lambda: str(batch.progress().total)) == "2"
        assert batch.progress().total == 2


def test_a_child_that_ends_by_the_interpreter_leaves_the_parents_fleet_alone(
    redis_url: str, tmp_path: Path
) -> None:
    """Its exit handlers run; they close nothing of the parent's."""
    script = tmp_path / "forks.py"
    script.write_text(
        "import os, sys\n"
        "from stepfleet.orchestrator import Agent, Fleet\n"
        "plain = Agent('plain', model='openai:any')\n"
        "fleet = Fleet(sys.argv[1])\n"
        "fleet.submit(plain, 'before')\n"
        "if (child := os.fork()) == 0:\n"
        "    fleet.submit(plain, 'child')\n"
        "    sys.exit(0)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "fleet.submit(plain, 'after')\n"
        "print('status', status)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), redis_url],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("status 0\n", "", 0)


APP = """
import os
from celery import Celery
from stepfleet.orchestrator import Agent, Fleet

app = Celery("theirs", broker=os.environ["THEIR_REDIS"], backend=os.environ["THEIR_REDIS"])
app.conf.task_default_queue = "theirs"
fleet = Fleet(os.environ["THEIR_REDIS"])
plain = Agent("plain", model="openai:any")
fleet.submit(plain, "at the import")

@app.task(name="theirs.submit")
def submit(question):
    return [os.getpid(), fleet.submit(plain, question)]
"""


def test_a_fleet_of_a_module_works_in_the_children_of_a_prefork_celery_app(
    redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "theirs.py").write_text(APP)
    env = {**os.environ, "THEIR_REDIS": redis_url, "PYTHONPATH": str(tmp_path)}
    options = ("-P", "prefork", "-c", "2")
    worker = CeleryWorker(
        tmp_path, app="theirs", name="w@theirs", options=options, env=env, cwd=tmp_path
    )
    try:
        worker.start()
        with client_app(redis_url, redis_url) as app, Fleet(redis_url) as fleet:
            sent = [
                app.send_task("theirs.submit", (f"question {n}",), queue="theirs") for n in range(4)
            ]
            told = [one.get(timeout=LONG) for one in sent]
            assert worker.pid not in {pid for pid, _ in told}
            assert all(fleet.runs.show(run_id).run_id == run_id for _, run_id in told)
    finally:
        worker.end()
