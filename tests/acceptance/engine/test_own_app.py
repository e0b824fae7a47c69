"""Steps on workers of a user's own Celery app, beside its own tasks: the projects of the pages."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from support.deadlines import wait_until
from support.documents.documents import ROOT, blocks_of
from support.servers.redis_servers import short_folder
from support.workers.celery_worker import CeleryWorker
from support.workers.fleet_workers import QUICK

from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

LONG = 90.0
PAGE = (ROOT / "docs" / "how-to" / "own-celery-app.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "django_app"
RUNS = 60
SUBMIT = f"""
from collections import Counter
from shop.celery import app
from shop.tasks import answer_all
from stepfleet.orchestrator import Fleet
with Fleet(app=app) as fleet:
    answer_all.delay([f"how many? {{n}}" for n in range({RUNS})])
    found = []
    while not found:
        found = fleet.batches.newest()
    results = []
    for result in fleet.batches.get(found[0].batch_id).results():
        results.append(result)
        if len(results) == 5:
            print("some have ended", flush=True)
            input()
    assert Counter(one.output for one in results) == Counter(
        f"12 of how many? {{n}}" for n in range({RUNS})
    )
    answer_all.delay(["again"])
    while len(found) < 2:
        found = fleet.batches.newest()
    print([one.output for one in fleet.batches.get(found[0].batch_id).results()])
"""
Start = Callable[..., CeleryWorker]


def rules(request: RequestRecord) -> Reply:
    if request.turn == 1:
        return Reply(tool_calls=(ToolCallReply("stock", {"product": "lamp"}),), latency=0.1)
    return Reply(f"{request.messages[-1]['content']} of {request.key}", latency=0.1)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.fixture
def environment(model: ModelServer, folder: Path) -> dict[str, str]:
    model.follow(rules)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STEPFLEET_")}
    given = {name: QUICK[name] for name in ("STEPFLEET_GRACE", "STEPFLEET_RESCUE_INTERVAL")}
    return {
        **kept,
        **given,
        "STEPFLEET_LEASE": "3",
        "OPENAI_BASE_URL": model.url,
        "OPENAI_API_KEY": "sk-test",
        "PYTHONPATH": str(folder),
    }


@pytest.fixture
def start(folder: Path, environment: dict[str, str]) -> Iterator[Start]:
    workers: list[CeleryWorker] = []

    def start(name: str, *options: str) -> CeleryWorker:
        worker = CeleryWorker(
            *(folder,), app="shop", name=f"{name}@own", options=options, env=environment, cwd=folder
        )
        workers.append(worker)
        return worker.start()

    yield start
    for worker in workers:
        worker.end()


def python(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str], said: str | None = None) -> str:
    output, _ = process.communicate(said, timeout=LONG)
    assert process.returncode == 0, output
    return output


def made_from_page(folder: Path, redis_url: str, more: str) -> None:
    """Write the page's files, with the test's Redis in place of the page's."""
    for block in blocks_of(PAGE):
        if block.language == "python":
            path = folder / block.text.splitlines()[0].removeprefix("# ")
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text.replace("redis://localhost:6379/0", redis_url))
    (folder / "shop" / "__init__.py").touch()
    with (folder / "shop" / "celery.py").open("a") as file:
        file.write(more)


def test_steps_run_on_the_pages_app_and_a_killed_worker_costs_neither_runs_nor_own_tasks(
    redis_url: str, folder: Path, environment: dict[str, str], start: Start, model: ModelServer
) -> None:
    strange = (
        "app.conf.update(result_backend=app.conf.broker_url, task_acks_on_failure=False,"
        " task_store_errors_even_if_ignored=True, task_default_rate_limit='1/h',"
        " task_annotations={'shop.tasks.answer_all': {'rate_limit': 0}},"
        " stepfleet_prefix='agents:',"
        " broker_transport_options={'global_keyprefix': 'shop_'},"
        " task_routes=([('shop.*', {'queue': 'celery'}), ('*', {'queue': 'nowhere'})],))\n"
    )
    made_from_page(folder, redis_url, strange)
    options = ("-Q", "celery,stepfleet", "-P", "threads", "-c", "8")
    killed, other = start("a", *options), start("b", *options)
    asking = python(folder, environment, "-c", SUBMIT)
    assert asking.stdout is not None
    assert asking.stdout.readline() == "some have ended\n"
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert ended(asking, "\n") == "['12 of again']\n"
    answered = [one.key for one in model.requests if one.turn == 2]
    assert len(set(answered)) == RUNS + 1
    assert len(answered) <= RUNS + 1 + 8, "only steps in the killed worker's hands are repeated"
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        keys = set(client.scan_iter("*"))
        strange_keys = {one for one in keys if not one.startswith(("agents:sf:", "shop_"))}
        assert all("celery-task-meta" in one for one in strange_keys)
        assert len(strange_keys) <= 2, "no results of steps: those of the two own tasks"
    other.signal(signal.SIGTERM)
    assert other.wait(LONG) == 0


def test_a_django_projects_workers_do_steps_whose_tools_use_its_models(
    redis_url: str, folder: Path, environment: dict[str, str], start: Start
) -> None:
    django = {
        "DJANGO_SETTINGS_MODULE": "shop.settings",
        "SHOP_DATABASE": str(folder / "shop.sqlite3"),
        "SHOP_BROKER": redis_url,
        "PYTHONPATH": str(EXAMPLE),
    }
    environment |= django
    ended(python(folder, environment, "-m", "django", "migrate", "--run-syncdb", "-v", "0"))
    start("prefork", "-Q", "celery,stepfleet", "-P", "prefork", "-c", "2")
    asks = (
        "import shop, django; django.setup()\n"
        "from shop.models import Product; from shop.tasks import restock\n"
        "from stepfleet.orchestrator import Fleet\n"
        "restock.delay('lamp', 7)\n"
        "while not Product.objects.filter(pieces=7).exists(): pass\n"
        "with Fleet(app=shop.celery_app) as fleet: print(fleet.run('clerk', 'how many?'))\n"
    )
    assert ended(python(folder, environment, "-c", asks)) == "7 of how many?\n"


def test_a_worker_that_reads_only_other_queues_stays_as_it_was(
    redis_url: str, folder: Path, start: Start
) -> None:
    made_from_page(folder, redis_url, "")
    worker = start("plain", "-P", "solo")
    said = "no steps run here: this worker does not read stepfleet"
    wait_until(lambda: said in worker.log, within=LONG)
    assert "stepfleet.step" not in worker.log
    with redis.Redis.from_url(redis_url) as client:
        assert not client.exists("sf:workers")


OWN_TASKS = """
import asyncio
import threading
import time

from celery import current_task

from shop.celery import app
from stepfleet.worker.engine.bridge import await_


async def later(value):
    await asyncio.sleep(0.01)
    return value


@app.task(bind=True)
def runs(self, value):
    assert self.request.id == current_task.request.id
    return [asyncio.run(later(value)), threading.current_thread().name]


@app.task(bind=True, max_retries=1)
def retries(self):
    if not self.request.retries:
        raise self.retry(countdown=0)
    return asyncio.run(later("retried"))


@app.task
def fails():
    raise ValueError("as it does")


@app.task
def blocks(seconds):
    time.sleep(seconds)
    return "blocked"


@app.task
def awaits(value):
    return [await_(later(value)), threading.current_thread().name]


@app.task
def waits_indirectly(value):
    return helper(value)


def helper(value):
    return await_(later(value))
"""
USES_THEM = """
from shop.own import awaits, blocks, fails, retries, runs, waits_indirectly
blocked = [blocks.delay(3) for _ in range(5)]
assert runs.delay(1).get(timeout=60) == [1, "stepfleet-own-task"]
assert retries.delay().get(timeout=60) == "retried"
assert waits_indirectly.delay(3).get(timeout=60) == 3
value, thread = awaits.delay(2).get(timeout=60)
assert (value, thread != "stepfleet-own-task") == (2, True), thread
try:
    fails.delay().get(timeout=60)
except ValueError as error:
    print(error)
print([one.get(timeout=60) for one in blocked] == ["blocked"] * 5)
"""


def test_own_tasks_may_call_asyncio_run_and_block_under_the_asyncio_pool(
    redis_url: str, folder: Path, environment: dict[str, str], start: Start
) -> None:
    made_from_page(folder, redis_url, "app.conf.update(result_backend=app.conf.broker_url)\n")
    (folder / "shop" / "own.py").write_text(OWN_TASKS)
    pool = ("-P", "custom", "-c", "50", "-I", "shop.own")
    environment["CELERY_CUSTOM_WORKER_POOL"] = "stepfleet.worker.engine.pool:Pool"
    worker = start("asyncio", "-Q", "celery,stepfleet", *pool)
    said = ended(python(folder, environment, "-c", USES_THEM))
    assert said == "as it does\nTrue\n", worker.log
