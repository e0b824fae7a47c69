"""Real Stepfleet workers on a test's Redis: started, killed, frozen and stopped at will."""

import os
from pathlib import Path

from support.workers.celery_worker import PROGRAM, CeleryWorker

AGENTS = Path(__file__).parents[2] / "acceptance" / "agent_modules" / "agents.py"
QUICK = {
    "STEPFLEET_LEASE": "2",
    "STEPFLEET_GRACE": "1",
    "STEPFLEET_RESCUE_INTERVAL": "0.3",
    "STEPFLEET_SLOTS": "50",
    "STEPFLEET_DRAIN": "2",
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
