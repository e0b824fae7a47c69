"""Real Stepfleet workers on a test's Redis: started, killed, frozen and stopped at will."""

import contextlib
import os
from pathlib import Path
from typing import Self

from redis import Redis
from redis.exceptions import RedisError
from support.deadlines import wait_until
from support.workers.celery_worker import PROGRAM, CeleryWorker

from stepfleet.orchestrator.store.keys import NAMES, Keys

AGENTS = Path(__file__).parents[2] / "acceptance" / "agent_modules" / "agents.py"
QUICK = {
    "STEPFLEET_LEASE": "2",
    "STEPFLEET_GRACE": "1",
    "STEPFLEET_RESCUE_INTERVAL": "0.3",
    "STEPFLEET_SLOTS": "50",
    "STEPFLEET_DRAIN": "2",
    "STEPFLEET_METRICS_PORT": "0",  # hundreds of workers: those alone whose test reads them
}


class FleetWorker(CeleryWorker):
    """One `celery -A stepfleet.worker.app worker` process, and its log."""

    def __init__(
        self,
        folder: Path,
        redis_url: str,
        model_url: str,
        *,
        name: str = "w1",
        options: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        program: tuple[str, ...] = PROGRAM,
    ) -> None:
        told = {
            **os.environ,
            **QUICK,
            "STEPFLEET_REDIS_URL": redis_url,
            "STEPFLEET_AGENTS": str(AGENTS),
            "OPENAI_BASE_URL": model_url,
            "OPENAI_API_KEY": "sk-test-canary",
            **(env or {}),
        }
        super().__init__(
            folder,
            app="stepfleet.worker.app",
            name=name if "@" in name else f"{name}@test",
            options=options,
            env=told,
            cwd=folder,
            program=program,
        )
        self._url = told["STEPFLEET_REDIS_URL"]
        self._names = Keys(prefix=told.get("STEPFLEET_PREFIX", "")).of(NAMES)

    def start(self) -> Self:
        """Start the process and return when it consumes, and clients know its agents by name.

        It announces them as soon as it is connected. Not all tests let this process look for them.
        """
        super().start()
        with contextlib.suppress(AssertionError, RedisError, ValueError):
            wait_until(self._is_known, within=3, what="its agents announced")
        return self

    def _is_known(self) -> bool:
        with Redis.from_url(self._url, socket_timeout=2) as client:
            return bool(client.exists(self._names))
