"""Says when something has changed, by server-sent events (WHATWG HTML, section 9.2).

One reader per topic, shared by all tabs that show it: a few fields are read once a second. A tab
then reads again what it shows, so that no event can be lost.
"""

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Iterator

from tornado import web
from tornado.iostream import StreamClosedError

from stepfleet.orchestrator.dashboard.api.handling import ApiHandler, Site
from stepfleet.orchestrator.errors import AgentException, ConfigurationError

log = logging.getLogger(__name__)

SECONDS = 1.0
"""Between two looks at a topic."""
FLEET_SECONDS = 2.0
HEARTBEAT = 15.0
"""Seconds after which a stream without changes says that it lives."""
MOST_TABS, MOST_TOPICS = 500, 4
_TOPIC = re.compile(r"(run|batch):[^\x00-\x1f]{1,200}|fleet")


class Topics:
    """The readers of topics that somebody watches."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._tabs: dict[str, set[asyncio.Event]] = {}

    @property
    def tabs(self) -> int:
        """How many streams are open, counted by their topics."""
        return sum(map(len, self._tabs.values()))

    @contextlib.contextmanager
    def watched(self, topic: str, changed: asyncio.Event) -> Iterator[None]:
        """Have `changed` set when the topic has changed."""
        self._tabs.setdefault(topic, set()).add(changed)
        if topic not in self._readers:
            self._readers[topic] = asyncio.create_task(self._read(topic))
        try:
            yield
        finally:
            self._tabs[topic].discard(changed)
            if not self._tabs[topic]:
                del self._tabs[topic]
                self._readers.pop(topic).cancel()

    async def _read(self, topic: str) -> None:
        before: object = None
        while True:
            try:
                found = await self._state(topic)
            except (AgentException, OSError) as error:  # Redis may come back, the run may come
                log.debug("%s: %s", topic, error)
                found = None
            except Exception:
                log.exception("topic %s could not be read", topic)
                found = None
            if found != before:
                before = found
                for changed in self._tabs.get(topic, ()):
                    changed.set()
            await asyncio.sleep(FLEET_SECONDS if topic == "fleet" else SECONDS)

    async def _state(self, topic: str) -> object:
        """Return what differs when the topic has changed."""
        kind, _, name = topic.partition(":")
        fleet = self._site.fleet
        if kind == "run":
            run = (await fleet.runs.timeline(name, limit=1, content=False)).run
            return run.status, run.updated, run.steps, run.stop_reason
        if kind == "batch":
            return await (await fleet.batches.get(name)).progress()
        return object()  # a fleet is never still


class Live(ApiHandler):
    """Changes of up to four topics, as server-sent events."""

    def initialize(self, site: Site, topics: Topics) -> None:  # type: ignore[override]
        """Store the site and its topics."""
        super().initialize(site)
        self._topics = topics
        self._left = asyncio.Event()

    async def get(self) -> None:
        """Stream until the reader leaves."""
        given = self.request.query_arguments.get("topic", [])
        names = [name.decode("utf-8", "replace") for name in given]
        if not 1 <= len(names) <= MOST_TOPICS or not all(map(_TOPIC.fullmatch, names)):
            text = f"topic: write 1 to {MOST_TOPICS} of run:ID, batch:ID, fleet"
            return self.refuse(ConfigurationError(text), 400)
        if self._topics.tabs >= MOST_TABS:
            raise web.HTTPError(503, "too many open pages; close some")
        self.set_header("Content-Type", "text/event-stream; charset=UTF-8")
        self.set_header("X-Accel-Buffering", "no")  # proxies pass each event on
        events = {name: asyncio.Event() for name in names}
        with contextlib.ExitStack() as stack:
            for name, changed in events.items():
                stack.enter_context(self._topics.watched(name, changed))
            with contextlib.suppress(StreamClosedError):
                await self._stream(events)
        return None

    def on_connection_close(self) -> None:
        """End the stream."""
        self._left.set()

    async def _stream(self, events: dict[str, asyncio.Event]) -> None:
        self.write(": open\n\n")
        await self.flush()
        while not self._left.is_set():
            waits = [asyncio.ensure_future(one.wait()) for one in (*events.values(), self._left)]
            try:
                done, _ = await asyncio.wait(
                    waits, timeout=HEARTBEAT, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                for wait in waits:
                    wait.cancel()
            if self._left.is_set():
                return
            for name, changed in events.items():
                if changed.is_set():
                    changed.clear()
                    self.write(f"event: change\ndata: {json.dumps({'topic': name})}\n\n")
            if not done:
                self.write(": alive\n\n")
            await self.flush()
