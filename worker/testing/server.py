"""The scripted model server inside a test: its own thread, real HTTP, started by `with`.

Composes the parts; decides nothing.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from stepfleet.worker.engine.loop_thread import LoopThread
from stepfleet.worker.testing.http.request_log import RequestLog
from stepfleet.worker.testing.http.service import Service
from stepfleet.worker.testing.http.serving import Endpoint
from stepfleet.worker.testing.openai.conversation import first_user_text
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.rules import Rules, Said, as_rules
from stepfleet.worker.testing.scenario.faults import Fault, Faults, Planned
from stepfleet.worker.testing.scenario.latency import Latency
from stepfleet.worker.testing.scenario.limits import RateLimit, RateLimiter

# Below the ephemeral ports: there a client that retries a dead port can connect to itself.
_LOWEST, _COUNT = 20_000, 12_000
_TRIES = 200
_BACKLOG = 4096
_KEEP_ALIVE = 3600.0
_SHUTDOWN_SECONDS = 0.2

Serve = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_silent = logging.getLogger("stepfleet.worker.testing.http")


@dataclass(frozen=True, slots=True)
class Listener:
    """An open port that answers HTTP until it is closed."""

    server: web.Server
    sockets: asyncio.Server
    port: int

    async def close(self) -> None:
        """Stop listening and end every connection, open requests included."""
        self.sockets.close()
        await self.server.shutdown(_SHUTDOWN_SECONDS)


async def listen(serve: Serve, host: str, port: int | None) -> Listener:
    """Serve on `port`, or on a free one from 20000 to 31999 where it is None.

    Raises `OSError` that names the port where it is taken.
    """
    loop = asyncio.get_running_loop()
    server = web.Server(
        serve,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=_KEEP_ALIVE,
        logger=_silent,
    )
    wanted = [port] if port is not None else _free_ports()
    refused: OSError | None = None
    for number in wanted:
        try:
            sockets = await loop.create_server(server, host, number, backlog=_BACKLOG)
        except OSError as error:
            refused = error
            continue
        return Listener(server, sockets, number)
    named = port if port is not None else f"any of {_TRIES} from {_LOWEST}"
    raise OSError(f"the model server cannot listen on {host} port {named}: {refused}")


def _free_ports() -> list[int]:
    return [_LOWEST + secrets.randbelow(_COUNT) for _ in range(_TRIES)]


_STARTING_SECONDS = 10.0
_CLOSING_SECONDS = 5.0


class ModelServer:
    """An OpenAI-compatible service whose model follows rules or scripts.

    `rules` is a callable from `RequestRecord` to a reply, or a mapping from conversation key to
    the replies of its turns. `latency` is in seconds. The key of a conversation is the text of
    its first user message unless `key` makes another of the request's body. Without `port` a
    free one below 32768 is taken. `limits` are enforced for each model and key: one for all models,
    or by the model's name. Prompts of more than `context_window` tokens are refused. Raises
    `OSError` on entering where the port is taken.
    """

    def __init__(  # noqa: PLR0913 - one argument per way in which servers differ
        self,
        rules: Rules | Mapping[str, Sequence[Said]] | None = None,
        *,
        faults: Faults | None = None,
        latency: Latency | float = 0.0,
        limits: RateLimit | Mapping[str, RateLimit] | None = None,
        context_window: int | None = None,
        log: RequestLog | None = None,
        key: Callable[[dict[str, Any]], str] = first_user_text,
        host: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        self.log = log or RequestLog()
        self.host = host
        self._port = port
        self._scripts = as_rules(rules)
        by_model = {"": limits} if isinstance(limits, RateLimit) else limits
        self._service = Service(
            self._scripts, faults or Faults(), RateLimiter(by_model), context_window
        )
        self._endpoint = Endpoint(
            self._service,
            latency if isinstance(latency, Latency) else Latency(latency),
            self.log,
            key=key,
        )
        self._listener: Listener | None = None
        self._thread: LoopThread | None = None

    @property
    def url(self) -> str:
        """The base URL for clients (`OPENAI_BASE_URL`). Needs a started server."""
        if self._listener is None:
            raise RuntimeError("the model server is not started; use it in a `with` block")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self._listener.port}/v1"

    @property
    def requests(self) -> tuple[RequestRecord, ...]:
        """The requests that the log keeps, in order of arrival."""
        return self.log.requests

    @property
    def violations(self) -> tuple[str, ...]:
        """The errors of refused requests, failures of the rules included."""
        return self.log.violations

    def count(self, key: str, turn: int) -> int:
        """Return how often that turn (from 1) of that conversation was requested."""
        return self.log.counts.get((key, turn), 0)

    def script(self, key: str, *replies: Said) -> None:
        """Let the conversation `key` get these replies, one per turn."""
        self._scripts = self._scripts.with_script(key, replies)
        self._service.rules = self._scripts

    def follow(self, rules: Rules | Mapping[str, Sequence[Said]]) -> None:
        """Follow these rules or scripts from now on, instead of all earlier ones."""
        self._scripts = as_rules(rules)
        self._service.rules = self._scripts

    def fail(
        self,
        fault: Fault | str,
        *,
        key: str | None = None,
        turn: int | None = None,
        attempt: int | None = 1,
    ) -> None:
        """Plan a fault; None means any conversation, turn or attempt."""
        fault = fault if isinstance(fault, Fault) else Fault(fault)
        faults = self._service.faults
        planned = (*faults.planned, Planned(fault, key, turn, attempt))
        self._service.faults = replace(faults, planned=planned)

    def limit(self, limit: RateLimit | None, model: str = "") -> None:
        """Enforce the limit from now on: on a model, or on all without one; None lifts it."""
        self._service.limiter.change(limit, model)

    async def start(self) -> None:
        """Serve on the running loop, instead of in a thread."""
        self._listener = await listen(self._endpoint.serve, self.host, self._port)

    async def stop(self) -> None:
        """End what `start` began; open requests end unanswered."""
        if self._listener is not None:
            await self._listener.close()
        self.log.close()

    def __enter__(self) -> Self:
        """Serve in a thread of its own."""
        thread = LoopThread("model-server")
        thread.start()
        try:
            started = asyncio.run_coroutine_threadsafe(self.start(), thread.loop)
            started.result(_STARTING_SECONDS)
        except BaseException:
            thread.stop(self.stop(), _CLOSING_SECONDS)
            raise
        self._thread = thread
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the server and its thread."""
        if self._thread is not None:
            self._thread.stop(self.stop(), _CLOSING_SECONDS)
            self._thread = None
