"""What a web server answers to a webhook: its status is read, and little else."""

import gzip
import tracemalloc
from contextlib import nullcontext, suppress
from functools import cache
from typing import Any

import pytest
from aiohttp import web

from stepfleet.orchestrator.events.broadcast import Webhook, WebhookError


@cache
def bomb() -> bytes:
    return gzip.compress(b" " * 200_000_000)


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("kind", ["compressed", "endless"])
async def test_an_answer_of_a_web_server_is_neither_unpacked_nor_kept(
    status: int, kind: str
) -> None:
    """It says nothing that anybody needs, and 0.2 MB of it can be 200 MB."""
    compressed = bomb()

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        headers = {"Content-Encoding": "gzip"} if kind == "compressed" else {}
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(request)
        with suppress(ConnectionError):
            if kind == "compressed":
                await response.write(compressed)
            else:
                while True:
                    await response.write(b"x" * 65_536)
        return response

    tracemalloc.start()
    try:
        async with Answering(answer) as url:
            one = Webhook(url)
            with nullcontext() if status == 200 else pytest.raises(WebhookError, match="500"):
                await one.broadcast("c", {"event_id": "1"})
            await one.aclose()
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


class Answering:
    """A web server that answers every request by one function."""

    def __init__(self, answer: Any) -> None:
        app = web.Application()
        app.router.add_post("/hook", answer)
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)

    async def __aenter__(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/hook"

    async def __aexit__(self, *raised: object) -> None:
        await self._runner.cleanup()
