"""Pages in Flower: skeletons of HTML whose modules read the JSON API, and their live updates."""

import asyncio
import contextlib
import hashlib
import json
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from flower.views import BaseHandler
from redis.exceptions import RedisError
from tornado import web
from tornado.iostream import StreamClosedError
from tornado.template import Loader, Template

from stepfleet.orchestrator.client.fleet import AsyncFleet, store_of
from stepfleet.orchestrator.client.watching.watch import Position, RunWatch
from stepfleet.orchestrator.dashboard.api.handling import ApiHandler, Site
from stepfleet.orchestrator.dashboard.api.routes import PREFIX
from stepfleet.orchestrator.dashboard.tasks import with_link
from stepfleet.orchestrator.errors import AgentException, ConfigurationError
from stepfleet.orchestrator.events.envelope import EventType, StreamedText
from stepfleet.orchestrator.store.keys import LIMIT_SETTINGS, WORKERS
from stepfleet.orchestrator.store.limits import VERSION
from stepfleet.orchestrator.store.runs.listing import LISTS
from stepfleet.orchestrator.store.store import Store

SECONDS = 1.0
"""The least time between two changes of a topic."""
FLEET_SECONDS = 2.0
SIZES_EVERY = 4
"""Every this many looks at a quiet fleet, the sizes of all lists of runs are read."""
LONGEST_QUIET = 15.0
"""Seconds after which the fleet is shown anew in any case: workers may have fallen silent."""
ENDED_SECONDS = 3.0
"""Between two looks at a run that has ended: a retry brings it back."""
LONGEST_TEXT = 20_000
"""Characters of a text that are sent while it is written: its end."""
States = AsyncGenerator[Any, None]


class Topics:
    """Reads what pages show of one fleet."""

    def __init__(self, fleet: AsyncFleet) -> None:
        self._fleet = fleet
        self._watch: RunWatch | None = None

    async def run(self, run_id: str) -> States:
        """Yield when the run has moved."""
        position: Position | None = None
        while True:
            position = await self._moved(run_id, position)
            yield None
            await asyncio.sleep(SECONDS)

    async def text(self, run_id: str) -> States:
        """Yield the text of the run's newest model call as far as it is written."""
        chunks = (await store_of(self._fleet)).chunks
        text, step, after = StreamedText(), 0, "0"
        position: Position | None = None
        while True:
            position = await self._moved(run_id, position, chunks=True)
            written, after = await chunks.read(run_id, after)
            while written:
                for chunk in written:
                    if chunk["type"] != EventType.STREAM_CHUNK:
                        continue
                    number = chunk["payload"]["step_number"]
                    if number > step:
                        text, step = StreamedText(), number
                    if number == step:
                        text.add(chunk)
                written, after = await chunks.read(run_id, after)
            if step:
                yield {
                    "step": step,
                    "text": text.text[-LONGEST_TEXT:],
                    "left_out": max(len(text.text) - LONGEST_TEXT, 0),
                    "is_open": text.is_open,
                }
            await asyncio.sleep(SECONDS)

    async def batch(self, batch_id: str) -> States:
        """Yield when counters of the batch have changed."""
        batches = (await store_of(self._fleet)).batches
        before: object = None
        while True:
            manifest = await batches.find(batch_id)
            found = manifest, await batches.counters(batch_id)
            if found != before:
                before = found
                yield None
            await asyncio.sleep(SECONDS)

    async def fleet(self) -> States:
        """Yield when the fleet has changed, while runs are active, and now and then: is it paused?

        Runs that end between two looks are found by the sizes of all lists: those are read rarely.
        """
        store = await store_of(self._fleet)
        before: object = None
        lists: object = None
        quiet, at = 0, float("-inf")
        while True:
            is_active, found, flags = await _fleet(store)
            quiet = 0 if is_active else quiet + 1
            if quiet % SIZES_EVERY == 1:
                lists = await _sizes(store)
            if is_active or (found, lists) != before or time.monotonic() - at > LONGEST_QUIET:
                before, at = (found, lists), time.monotonic()
                yield {"paused": "fleet" in flags}
            await asyncio.sleep(FLEET_SECONDS)

    async def _moved(self, run_id: str, seen: Position | None, *, chunks: bool = False) -> Position:
        """Return the position of a run that has moved; ended ones are looked at rarely."""
        # Why nothing moves is not its business: the page of the fleet says it.
        watch = self._watch = self._watch or RunWatch(await store_of(self._fleet))
        if seen is None or not seen.is_over:
            return await watch.moved(run_id, seen, chunks=chunks)
        newest = seen
        while newest == seen:
            await asyncio.sleep(ENDED_SECONDS)
            newest = await watch.moved(run_id, chunks=chunks)
        return newest


async def _fleet(store: Store) -> tuple[bool, object, Collection[str]]:
    """Return whether runs are active, what differs when something has happened, and the flags."""
    found = store.keys
    *counts, workers, flags, limits = await store.connection.execute_all(
        *(("ZCARD", found.due(shard)) for shard in range(found.shards)),
        ("HKEYS", found.of(WORKERS)),
        ("HGETALL", found.flags(0)),
        ("HGET", found.of(LIMIT_SETTINGS), VERSION),
    )
    return any(counts), (counts, sorted(workers), flags, limits), flags


async def _sizes(store: Store) -> list[int]:
    """Return the sizes of all lists of runs."""
    tags = [store.keys.tag(shard) for shard in range(store.keys.shards)]
    lists = [f"{tag}runs:{name}" for tag in tags for name in LISTS]
    return await store.connection.execute_all(*(("ZCARD", name) for name in lists))


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
        """Return what has changed; nothing after `seconds`."""
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


OWN = Path(__file__).parent
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; "
    "base-uri 'none'"
)
"""No script and no style but from files of this server."""
TABS = ("runs", "batches", "approvals", "fleet", "costs", "quarantine")
_TAB = """
        <li class="nav-item">
          <a class="nav-link{{% if active_tab == '{0}' %}} active{{% end %}}"
            {{% if active_tab == '{0}' %}}aria-current="page"{{% end %}}
            href="{{{{ reverse_url('{0}') }}}}">{1}</a>
        </li>"""
_IMPORT = re.compile(r'^import .* from "\./(\w+\.js)";$', re.MULTILINE)
_PAGES = {
    "/runs": ("runs", "runs"),
    "/runs/[^/]{1,200}": ("run", "runs"),
    "/batches": ("batches", "batches"),
    "/batches/[^/]{1,200}": ("batch", "batches"),
    "/approvals": ("approvals", "approvals"),
    "/fleet": ("fleet", "fleet"),
    "/costs": ("costs", "costs"),
}


class Templates(Loader):
    """Flower's templates and ours; our tabs come after Flower's own."""

    def _create_template(self, name: str) -> Template:
        own = OWN / "templates" / name
        text = own.read_bytes() if own.is_file() else (Path(self.root) / name).read_bytes()
        if name == "navbar.html":
            tabs = "".join(_TAB.format(tab, tab.capitalize()) for tab in TABS).encode()
            text = text.replace(b"\n      </ul>", tabs + b"\n      </ul>", 1)
        if name == "task.html":
            text = with_link(text)
        return Template(text, name=name, loader=self)


class Page(BaseHandler):
    """A page. Flower's own authentication guards it."""

    def initialize(self, template: str, tab: str) -> None:
        """Store which page it is."""
        self._template, self._tab = template, tab

    def set_default_headers(self) -> None:
        """Allow nothing but our own files, and no other site to frame the page."""
        super().set_default_headers()
        self.set_header("Content-Security-Policy", POLICY)
        self.set_header("Referrer-Policy", "same-origin")
        self.set_header("Cache-Control", "no-store")

    @web.authenticated
    def get(self) -> None:
        """Show the skeleton."""
        found = modules(self._template)
        self.render(f"{self._template}.html", active_tab=self._tab, modules=found)


class Assets(web.StaticFileHandler):
    """Styles and modules. Their address has their version, so browsers keep them for good."""

    def set_extra_headers(self, path: str) -> None:
        """Let browsers keep the file."""
        del path
        self.set_header("Cache-Control", "public, max-age=31536000, immutable")
        self.set_header("X-Content-Type-Options", "nosniff")


@cache
def modules(page: str) -> tuple[str, ...]:
    """Return the modules that a page runs, its own first: browsers load all of them at once."""
    found = [f"{page}.js"]
    for name in found:  # which grows by what its modules import
        text = (OWN / "static" / name).read_text(encoding="utf-8")
        found += [one for one in _IMPORT.findall(text) if one not in found]
    return tuple(found)


@cache
def version() -> str:
    """Return a name for the content of all files."""
    content = hashlib.sha256()
    for file in sorted((OWN / "static").iterdir()):
        content.update(file.name.encode() + b"\0" + file.read_bytes())
    return content.hexdigest()[:12]


def page_routes(site: Site) -> list[Any]:
    """Return the addresses of the pages, of their files, and of what keeps them up to date."""
    pages = [
        web.url(path, Page, {"template": template, "tab": tab}, name=template)
        for path, (template, tab) in _PAGES.items()
    ]
    assets = {"path": str(OWN / "static")}
    live = {"site": site, "hub": Hub(site)}
    return [
        *pages,
        web.url(rf"/stepfleet/{version()}/(.*)", Assets, assets, name="stepfleet"),
        web.url(f"{PREFIX}/live", Live, live),
    ]
