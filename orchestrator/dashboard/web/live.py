"""Server-sent events (WHATWG HTML, section 9.2): what is shown has changed, so read it again.

One reader per topic serves all tabs that show it. A tab reads again after each connection, so no
event can be lost, and none is kept.
"""

import asyncio
import contextlib
import json
import logging
import re
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from redis.exceptions import RedisError
from tornado import web
from tornado.iostream import StreamClosedError

from stepfleet.orchestrator.dashboard.api.handling import ApiHandler, Site
from stepfleet.orchestrator.dashboard.web.topics import Topics
from stepfleet.orchestrator.errors import AgentException, ConfigurationError

log = logging.getLogger(__name__)

HEARTBEAT = 15.0
"""Seconds after which a stream without changes says that it lives."""
STUCK = 60.0
"""Seconds that a client may take to receive what was sent."""
LONGEST_STREAM = 1800.0
"""Seconds until a browser connects anew: who may read is decided then once more."""
MOST_TABS, MOST_TABS_OF_USER = 500, 100
MOST_TOPICS, LONGEST_PAUSE = 4, 10.0
_ID = r"[0-9a-fA-F-]{36}"
_TOPIC = re.compile(rf"(?:run|text):{_ID}(?:\.[0-9a-f]{{10}}){{0,8}}|batch:{_ID}|fleet")
"""Runs below others have longer ids."""
_OUTAGES = (AgentException, RedisError, OSError, TimeoutError)


class Tab:
    """One stream: what has changed since it was last written. Has no more than its topics."""

    def __init__(self, user: str, topics: Sequence[str]) -> None:
        self.user = user
        self.topics = frozenset(topics)
        self._changed: dict[str, Any] = {}
        self._woken = asyncio.Event()
        self.is_left = False

    def add(self, topic: str, data: Any) -> None:
        """Note the newest state of a topic."""
        self._changed[topic] = data
        self._woken.set()

    def leave(self) -> None:
        """End the stream."""
        self.is_left = True
        self._woken.set()

    async def changes(self, seconds: float) -> dict[str, Any]:
        """Return what has changed; after so many seconds, nothing."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds)
        self._woken.clear()
        found, self._changed = self._changed, {}
        return found


class Hub:
    """All tabs, and the readers of the topics that they show."""

    def __init__(self, site: Site) -> None:
        self._topics = Topics(site.fleet)
        self._tabs: set[Tab] = set()
        self._users: Counter[str] = Counter()
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._latest: dict[str, Any] = {}

    @contextlib.contextmanager
    def joined(self, tab: Tab) -> Iterator[None]:
        """Send changes to a tab. Raises `HTTPError` for one too many."""
        if len(self._tabs) >= MOST_TABS or self._users[tab.user] >= MOST_TABS_OF_USER:
            raise web.HTTPError(429, "too many open pages: close some")
        self._tabs.add(tab)
        self._users[tab.user] += 1
        for topic in tab.topics:
            if topic not in self._readers:
                self._readers[topic] = asyncio.create_task(self._read(topic))
            elif topic in self._latest:
                tab.add(topic, self._latest[topic])
        try:
            yield
        finally:
            self._leave(tab)

    def _leave(self, tab: Tab) -> None:
        self._tabs.discard(tab)
        self._users[tab.user] -= 1
        self._users += Counter()  # without users that have none
        for topic in tab.topics - {topic for other in self._tabs for topic in other.topics}:
            self._readers.pop(topic).cancel()
            self._latest.pop(topic, None)

    async def _read(self, topic: str) -> None:
        """Pass on what has changed, through outages of Redis."""
        pause = 1.0
        while True:
            try:
                async with contextlib.aclosing(self._states(topic)) as states:
                    async for data in states:
                        pause = 1.0
                        self._publish(topic, data)
            except _OUTAGES as error:
                log.debug("%s cannot be read: %s", topic, error)
            except Exception:
                log.exception("%s cannot be read", topic)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)

    def _states(self, topic: str) -> AsyncGenerator[Any, None]:
        kind, _, name = topic.partition(":")
        if kind == "fleet":
            return self._topics.fleet()
        states: AsyncGenerator[Any, None] = getattr(self._topics, kind)(name)
        return states

    def _publish(self, topic: str, data: Any) -> None:
        self._latest[topic] = data
        for tab in self._tabs:
            if topic in tab.topics:
                tab.add(topic, data)


class Live(ApiHandler):
    """Changes of up to four topics, as server-sent events."""

    def initialize(self, site: Site, hub: Hub) -> None:  # type: ignore[override]
        """Store the site and its hub."""
        super().initialize(site)
        self._hub = hub
        self._tab = Tab("", ())

    async def get(self) -> None:
        """Stream until the reader leaves."""
        given = self.request.query_arguments.get("topic", [])
        topics = {name.decode("utf-8", "replace") for name in given}
        if not 1 <= len(topics) <= MOST_TOPICS or not all(map(_TOPIC.fullmatch, topics)):
            text = f"topic: write 1 to {MOST_TOPICS} of run:ID, batch:ID, text:ID, fleet"
            return self.refuse(ConfigurationError(text), 400)
        if not self.shows_content:
            topics = {one for one in topics if not one.startswith("text:")}
        self._tab = Tab(self.user, sorted(topics))
        with self._hub.joined(self._tab):
            self.set_header("Content-Type", "text/event-stream; charset=UTF-8")
            self.set_header("X-Accel-Buffering", "no")  # proxies pass each event on
            with contextlib.suppress(StreamClosedError, TimeoutError):
                async with asyncio.timeout(LONGEST_STREAM):
                    await self._stream()
        return None

    def on_connection_close(self) -> None:
        """End the stream."""
        super().on_connection_close()
        self._tab.leave()

    async def _stream(self) -> None:
        await self._send(f": {' '.join(sorted(self._tab.topics))}\n\n")
        while True:
            changes = await self._tab.changes(HEARTBEAT)
            if self._tab.is_left:
                return
            for topic, data in changes.items():
                text = json.dumps({"topic": topic, "data": data})
                await self._send(f"event: change\ndata: {text}\n\n")
            if not changes:
                await self._send(": alive\n\n")

    async def _send(self, text: str) -> None:
        self.write(text)
        await asyncio.wait_for(self.flush(), STUCK)
