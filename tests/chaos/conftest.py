"""Fixtures of the chaos tests: a scripted model, workers that may be made to die anywhere."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.servers.redis_servers import short_folder
from support.workers.fleet_workers import FleetWorker

from stepfleet.worker.testing.server import ModelServer

Launch = Callable[..., FleetWorker]
AGENTS = Path(__file__).parent / "agent_modules" / "chaos_agents.py"


@pytest.fixture(scope="module")
def model() -> Iterator[ModelServer]:
    """A model server that notes violations; tests script it."""
    with ModelServer() as server:
        yield server
        assert not server.violations


@pytest.fixture
def effects(tmp_path: Path) -> Path:
    """Return the file in which tools leave one line per effect."""
    file = tmp_path / "effects"
    file.touch()
    return file


@pytest.fixture
def launch(model: ModelServer, effects: Path) -> Iterator[Launch]:
    """Launch a worker without waiting for it: `launch(redis_url, name=..., env=...)`."""
    with contextlib.ExitStack() as cleanup:
        folder = cleanup.enter_context(short_folder())

        def launched(
            url: str, *, env: dict[str, str] | None = None, **given: object
        ) -> FleetWorker:
            own = {"STEPFLEET_AGENTS": str(AGENTS), "EFFECTS": str(effects), **(env or {})}
            options = (*given.pop("options", ()), "-Q", "stepfleet,heavy")  # type: ignore[misc]
            worker = FleetWorker(folder, url, model.url, env=own, options=options, **given)  # type: ignore[arg-type]
            cleanup.callback(lambda: sys.stderr.write(f"\n{worker.name}\n{worker.log[-5000:]}"))
            cleanup.callback(worker.end)
            return worker.launch()

        yield launched
