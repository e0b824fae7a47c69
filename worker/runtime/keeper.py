"""`stepfleet keeper`: a process that does all that workers do beside steps, and no steps.

It has no slots, serves no queue and needs no agents' code: the fleet may scale to zero.
"""

import argparse
import asyncio
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from importlib.util import find_spec
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from stepfleet.orchestrator.errors import AgentException, ConfigurationError, StoreError
from stepfleet.orchestrator.records.text.redaction import keep_secret
from stepfleet.orchestrator.settings.settings import Settings, load_settings
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.fleet.figures import fleet_figures
from stepfleet.orchestrator.store.fleet.overview import forget_workers, workers
from stepfleet.orchestrator.store.fleet.servers import server_info, warnings
from stepfleet.orchestrator.store.store import Store, open_store
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.leases.renewal import RENEWALS_PER_LEASE
from stepfleet.worker.runtime.crash_points import crash_points
from stepfleet.worker.runtime.small_server import HttpPage, SmallServer, json_page
from stepfleet.worker.runtime.upkeep import Upkeep, process_name, report, sign_off
from stepfleet.worker.telemetry.logs import CleanLines, JsonLines

if TYPE_CHECKING:
    from stepfleet.worker.telemetry.metrics import FleetMetrics

log = logging.getLogger(__name__)

LAST_SECONDS = 1.0
"""How long a stopping keeper repeats calls to a Redis that is away."""
END_SECONDS = 8.0
"""A keeper that has not ended so long after SIGTERM ends by force: others have its turns soon."""
REPORT_SECONDS = 20.0
"""It reports at least so often, and reads the workers' reports; each third of a lease if sooner."""
SILENT_SECONDS = 60.0
"""A keeper that has not read Redis for so long is not ready."""
AGAIN_SECONDS = 1.0
FIGURES_SECONDS = 2.0
"""For how long a page of metrics waits for Redis."""
_DIGITS = 6
FORMAT = "[%(asctime)s: %(levelname)s] %(message)s"
DOES = (
    "keeper %s: looks after overdue and delayed runs, schedules, batches, records, limits,"
    " circuits and %d sinks of events; does no steps; %s serves /live, /ready, /scale and /metrics"
)


class Keeper:
    """What keeps a fleet, and what it tells over HTTP; `settings` are the fleet's."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._store: Store | None = None
        self._why_not = "Redis has not been read yet"
        self._read_at = -math.inf
        self._rescued = 0
        self._metrics: FleetMetrics | None = None
        pages = {"/scale": self._scale, "/metrics": self._show_metrics}
        self.server = SmallServer(pages, {"/live": self._live, "/ready": self._ready})

    async def run(self, address: str) -> None:
        """Keep the fleet until cancelled; waits for a Redis that is away."""
        logged = ""
        while True:
            try:
                async with self._opened(address) as upkeep, asyncio.TaskGroup() as group:
                    group.create_task(self._keep_reported(upkeep))
                    for watch, called in upkeep.watches(self._note_rescued):
                        group.create_task(watch, name=called)
            except (AgentException, RedisError, OSError) as error:
                self._why_not = str(error)
                if self._why_not != logged:
                    logged = self._why_not
                    log.warning("waiting for the store: %s", error)
                await asyncio.sleep(AGAIN_SECONDS)

    @asynccontextmanager
    async def _opened(self, address: str) -> AsyncGenerator[Upkeep]:
        """Connect, and report that this keeper lives. Raises `StoreError`."""
        crash = crash_points(os.environ)
        async with AsyncExitStack() as stack:  # closed from the last to the first
            store = await open_store(self._settings, worker=process_name(), crash=crash)
            stack.push_async_callback(store.aclose)
            store.connection.patience = math.inf
            try:
                for warning in warnings(await server_info(store.connection)):
                    log.warning(warning)
                await forget_workers(store)
                stack.push_async_callback(sign_off, store, keys.KEEPERS)
                opening = Upkeep.open(store, Leases(time.monotonic), slots=0)
                upkeep = await stack.enter_async_context(opening)
                stack.push_async_callback(upkeep.gate.aclose)
                await upkeep.ticker.prepare()
                await self._report(upkeep)
                self._store = store
                log.info(DOES, process_name(), len(upkeep.sinks), address)
                yield upkeep
            finally:
                self._store, store.connection.patience = None, LAST_SECONDS

    async def _report(self, upkeep: Upkeep) -> None:
        """Report that this keeper lives, and learn how many slots there are."""
        await report(upkeep.store, keys.KEEPERS)
        alive = [one for one in await workers(upkeep.store) if one.alive]
        upkeep.note_slots(sum(one.slots for one in alive))
        self._read_at = time.monotonic()

    async def _keep_reported(self, upkeep: Upkeep) -> None:
        every = min(self._settings.lease / RENEWALS_PER_LEASE, REPORT_SECONDS)
        while True:
            await asyncio.sleep(every)
            try:
                await self._report(upkeep)
            except (AgentException, RedisError, OSError) as error:
                self._why_not = str(error)

    def _note_rescued(self, many: int) -> None:
        self._rescued += many

    async def _live(self, _: Mapping[str, str]) -> HttpPage:
        """Answer, which shows that the loop turns: a restart brings no Redis back."""
        return json_page({"live": True})

    async def _ready(self, _: Mapping[str, str]) -> HttpPage:
        silent = time.monotonic() - self._read_at
        if silent <= SILENT_SECONDS:
            return json_page({"ready": True, "read_seconds_ago": round(silent, 1)})
        why = self._why_not
        if math.isfinite(silent):
            why = f"Redis was read {silent:.0f} s ago: it does not answer"
        return json_page({"ready": False, "error": why}, HTTPStatus.SERVICE_UNAVAILABLE)

    async def _scale(self, query: Mapping[str, str]) -> HttpPage:
        """Answer with the signal of a `queue`, for autoscalers of others than `beside` workers."""
        if unknown := ", ".join(query.keys() - {"queue", "beside"}):
            raise ConfigurationError(f"{unknown}: not known; there are queue and beside")
        beside = query.get("beside", "0")
        if not (beside.isascii() and beside.isdecimal() and len(beside) <= _DIGITS):
            raise ConfigurationError("beside must be a number of workers, such as 2")
        store = self._connected()
        from stepfleet.orchestrator.store.fleet.scale import scale_signal  # noqa: PLC0415 - if asked

        found = await scale_signal(store, query.get("queue"), beside=int(beside))
        return json_page(found.model_dump(mode="json"))

    async def _show_metrics(self, _: Mapping[str, str]) -> HttpPage:
        if find_spec("prometheus_client") is None:
            fix = "prometheus_client is missing: install stepfleet[telemetry]"
            return json_page({"error": fix}, HTTPStatus.NOT_FOUND)
        # Some megabytes that most keepers need not have.
        from stepfleet.worker.telemetry.metrics import FleetMetrics  # noqa: PLC0415

        self._metrics = self._metrics or FleetMetrics()
        rescued, self._rescued = self._rescued, 0
        self._metrics.rescued(rescued)
        try:
            async with asyncio.timeout(FIGURES_SECONDS):  # a Redis that is away is shown as such
                self._metrics.show_fleet(await fleet_figures(self._connected()))
        except (AgentException, RedisError, OSError) as error:
            log.debug("the fleet's figures cannot be read: %s", error)
            self._metrics.show_fleet(None)
        kind, content = self._metrics.page()
        return HttpPage(content, kind=kind)

    def _connected(self) -> Store:
        """Return the store. Raises `StoreError` while there is none."""
        if self._store is None:
            raise StoreError(self._why_not)
        return self._store


async def keep(settings: Settings, host: str, port: int) -> None:
    """Keep the fleet until SIGTERM or SIGINT. Raises `ConfigurationError`."""
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, stopped.set)
    keeper = Keeper(settings)
    async with keeper.server.serve(host, port) as address:
        kept = asyncio.create_task(keeper.run(address))
        stopping = asyncio.create_task(stopped.wait())
        await asyncio.wait((kept, stopping), return_when=asyncio.FIRST_COMPLETED)
        _end_within(END_SECONDS)
        stopping.cancel()
        kept.cancel()
        await asyncio.wait((kept,))
        if not kept.cancelled() and (error := kept.exception()):
            raise error
    log.info("keeper %s has ended", process_name())


def _end_within(seconds: float) -> None:
    """End the process by force if it lasts longer: a thread of a submission may."""

    def leave() -> None:
        log.error("the keeper did not end within %g s; another one, or a worker, goes on", seconds)
        os._exit(1)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()


def _log(settings: Settings) -> None:
    """Log lines to standard error as workers do: without secrets, or as JSON."""
    for name, value in settings.secrets():
        keep_secret(name, value)
    handler = logging.StreamHandler()
    is_json = settings.log_format == "json"
    handler.setFormatter(JsonLines() if is_json else CleanLines(logging.Formatter(FORMAT)))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def main() -> None:
    """Run a keeper in the foreground; ends the process."""
    parser = argparse.ArgumentParser(prog="python -m stepfleet.worker.runtime.keeper")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    try:
        settings = load_settings()
        _log(settings)
        asyncio.run(keep(settings, given.host, given.port))
    except ConfigurationError as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
