"""Fixtures of the acceptance tests: real workers, a model server, a client."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fleet_workers import FleetWorker
from redis_servers import short_folder

from stepfleet.worker.testing import ModelServer

Start = Callable[..., FleetWorker]


@pytest.fixture
def model() -> Iterator[ModelServer]:
    """A model server without replies that notes violations; tests script it."""
    with ModelServer() as server:
        yield server
        assert not server.violations


@pytest.fixture
def start_worker(redis_url: str, model: ModelServer) -> Iterator[Start]:
    """Start real workers on the session's Redis: `start_worker(name=..., options=..., env=...)`."""
    with contextlib.ExitStack() as cleanup:
        folder: Path = cleanup.enter_context(short_folder())

        def start(url: str = redis_url, **given: object) -> FleetWorker:
            worker = FleetWorker(folder, url, model.url, **given)  # type: ignore[arg-type]
            cleanup.callback(worker.end)
            return worker.start()

        yield start
