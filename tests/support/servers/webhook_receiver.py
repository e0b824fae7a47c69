"""A web server that takes webhooks: checks signatures, answers as it is told, keeps what came."""

import time
from collections import Counter
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web

from stepfleet.orchestrator.events.broadcast import HEADER, verify


class Receiver:
    """Keeps every event that it has answered with 200; `answer` decides the status of the next."""

    def __init__(self, secret: str = "") -> None:
        self.secret = secret
        self.status = 200
        self.requests = 0
        self.taken: list[dict[str, Any]] = []
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/hook", self._hook)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/hook"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def of(self, run_id: str) -> list[dict[str, Any]]:
        """Return a run's events as they came first, without repetitions."""
        found: dict[str, dict[str, Any]] = {}
        for event in self.taken:
            if event["session_id"] == run_id:
                found.setdefault(event["event_id"], event)
        return list(found.values())

    def repeated(self) -> int:
        """Return how many events came more than once."""
        return sum(many > 1 for many in Counter(one["event_id"] for one in self.taken).values())

    async def _hook(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.requests += 1
        if self.secret:
            verify(self.secret, body, request.headers[HEADER], now=time.time())
        if self.status == 200:
            self.taken += orjson.loads(body)["events"]
        return web.Response(status=self.status)
