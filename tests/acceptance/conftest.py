"""Fixtures of the acceptance tests: real workers, a model server, a client."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.servers.redis_servers import RedisServer, short_folder
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
Rules = Callable[[RequestRecord], Reply]
Hold = Callable[[Rules, int], tuple[threading.Event, threading.Event]]
LONG = 60.0
# A worker that gets no processor for a while keeps its work; who kills one asks for less.
CALM = {"STEPFLEET_LEASE": "30"}


@pytest.fixture
def model() -> Iterator[ModelServer]:
    """A model server without replies that notes violations; tests script it."""
    with ModelServer() as server:
        yield server
        assert not server.violations


@pytest.fixture
def hold(model: ModelServer) -> Iterator[Hold]:
    """Follow rules that answer a turn only when the test has struck: `hold(rules, turn)`.

    Returns two events: a request for that turn is there, and the one that the test sets. No other
    request is answered in between.
    """
    every: list[threading.Event] = []

    def follow(rules: Rules, turn: int) -> tuple[threading.Event, threading.Event]:
        reached, struck = threading.Event(), threading.Event()
        every.append(struck)

        def held(request: RequestRecord) -> Reply:
            if request.turn >= turn and not struck.is_set():
                reached.set()
                struck.wait(LONG)
            return rules(request)

        model.follow(held)
        return reached, struck

    yield follow
    for one in every:
        one.set()


@pytest.fixture
def start_worker(redis_url: str, model: ModelServer) -> Iterator[Start]:
    """Start real workers on the session's Redis: `start_worker(name=..., options=..., env=...)`."""
    with contextlib.ExitStack() as cleanup:
        folder: Path = cleanup.enter_context(short_folder())

        def start(
            url: str = redis_url, *, env: dict[str, str] | None = None, **given: object
        ) -> FleetWorker:
            told = {**CALM, **(env or {})}
            worker = FleetWorker(folder, url, model.url, env=told, **given)  # type: ignore[arg-type]
            cleanup.callback(worker.end)
            return worker.start()

        yield start


@pytest.fixture
def fleet(redis_url: str) -> Iterator[Fleet]:
    """A client on the session's Redis."""
    with Fleet(redis_url) as opened:
        yield opened


@pytest.fixture
def commands() -> Iterator[CommandLine]:
    """The command line, in a folder of the test's own."""
    with short_folder() as folder:
        made = CommandLine(folder)
        try:
            yield made
        finally:
            made.end()


@pytest.fixture
def effects(tmp_path: Path) -> Path:
    """Return the file in which tools leave one line per effect."""
    file = tmp_path / "effects"
    file.touch()
    return file


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[RedisServer, ModelServer]]:
    """A Redis and a model server of a module's own, for a fleet that its tests share."""
    with short_folder() as folder, ModelServer() as model:
        redis = RedisServer(folder).start()
        try:
            yield redis, model
        finally:
            redis.stop()
        assert not model.violations
