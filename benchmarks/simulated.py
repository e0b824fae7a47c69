"""Simulated workers: what a real idle worker sends to Redis, recorded once, sent by many clients.

A recording has every command of one real worker by MONITOR, with its connection and its moment.
A simulated worker opens the same connections, each set up in the same way, and repeats the
recording from a random moment of it. Its name and its fetcher are its own. What a worker does only
when it is its turn (a scan for overdue runs, the upkeep of batches and lists) or when the shared
reading is old, it does only where Redis says so to it: the fleet shares these as real workers do.

When Redis wakes a connection that waits for messages, the worker fetches at once, by the same
script. A message that it takes it acknowledges with its next fetch; no step is done.
"""

import asyncio
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import hiredis
from monitor import Seen

from stepfleet.worker.engine.transport.ack_buffer import script

Command = tuple[bytes, ...]
SET_UP = frozenset({"hello", "client", "select", "subscribe", "psubscribe"})
BURST_SECONDS = 0.05
"""Commands of a connection that follow one another sooner belong to one piece of work."""
TRIP_SECONDS = 0.0002
"""Those that follow sooner than this were sent together."""
FETCH = script("fetch").sha.encode()
WHOLE = b""
_ENDS = {b"upkeep": b"follow-ups", b"tidied": WHOLE, b"rescuer": WHOLE}
"""Turns by the ends of their keys, and the key that the first command after one's work names."""
_CACHES = (b"scale", b"figures")
_SUBSCRIBED = (b"subscribe", b"psubscribe")


@dataclass(frozen=True)
class Part:
    """Commands sent in `trips`; with `gated` only if the last reply before says that it is due."""

    trips: tuple[tuple[Command, ...], ...]
    gated: bool = False


@dataclass(frozen=True)
class Burst:
    """A piece of work: seconds since the recording's start, its connection, and its parts."""

    at: float
    connection: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Recording:
    """What one idle worker sends in so many seconds.

    `set_ups` are the first commands of each connection, `identity` is the worker's name in Redis,
    `redirected` the id of the client that its fetching connection has woken, `ear` and `fetching`
    are the numbers of the two connections.
    """

    seconds: float
    set_ups: tuple[tuple[Command, ...], ...]
    bursts: tuple[Burst, ...]
    fetch: Command
    identity: bytes
    ear: int
    fetching: int


def recording(
    seen: Sequence[Seen], addresses: Sequence[str], began: float, seconds: float, identity: str
) -> Recording:
    """Return the recording of the worker whose connections are from `addresses`. Pure.

    `began`: epoch seconds; what was sent before serves only to set connections up.
    """
    by_address: dict[str, list[Seen]] = {address: [] for address in addresses}
    for one in seen:
        if one.by in by_address:
            by_address[one.by].append(one)
    kept = [sent for sent in by_address.values() if sent]
    set_ups = tuple(
        tuple(_set_up(one) for one in sent if one.name in SET_UP and one.words[1:] != ["ID"])
        for sent in kept
    )
    bursts = [
        burst
        for number, sent in enumerate(kept)
        for burst in _bursts(number, [one for one in sent if one.name not in SET_UP], began)
        if burst.at < seconds
    ]
    fetches = [
        (number, one.arguments)
        for number, sent in enumerate(kept)
        for one in sent
        if one.arguments[1:2] == (FETCH,) and one.name == "evalsha"
    ]
    ear = next(n for n, some in enumerate(set_ups) if any(b"invalidate" in c[-1] for c in some))
    fetching, fetch = fetches[-1]
    return Recording(seconds, set_ups, tuple(bursts), fetch, identity.encode(), ear, fetching)


def _set_up(one: Seen) -> Command:
    """Return a command without the password, which MONITOR does not show."""
    return one.arguments[:2] if one.name == "hello" else one.arguments


def _bursts(number: int, sent: Sequence[Seen], began: float) -> Iterator[Burst]:
    """Give the pieces of work of a connection, without fetches: a worker decides on these."""
    burst: list[Seen] = []
    for one in [*sent, None]:
        if burst and (one is None or one.at - burst[-1].at > BURST_SECONDS):
            is_fetch = burst[0].name == "evalsha" and burst[0].arguments[1] == FETCH
            if burst[0].at >= began and not is_fetch:
                yield Burst(burst[0].at - began, number, tuple(_parts(burst)))
            burst = []
        if one is not None:
            burst.append(one)


def _parts(burst: Sequence[Seen]) -> Iterator[Part]:
    """Divide a piece of work at the commands whose replies decide whether the rest is due."""
    part: list[Seen] = []
    until: Callable[[Command], bool] | None = None
    for one in burst:
        command = one.arguments
        if until is None or until(command):
            if until is not None and part:
                closing = command[0].upper() == b"SET"
                yield Part(_trips([*part, one] if closing else part), gated=True)
                part, until = [], None
                if closing:
                    continue
            part.append(one)
            if (found := _gate(command)) is not None:
                yield Part(_trips(part))
                part, until = [], found
        else:
            part.append(one)
    if part:
        yield Part(_trips(part), gated=until is not None)


def _gate(command: Command) -> Callable[[Command], bool] | None:
    """Return what tells the end of what this command's reply decides on; None where on nothing."""
    name = command[0].upper()
    key = next(iter(command[3 if name == b"EVALSHA" else 1 :]), b"")
    end = key.rpartition(b":")[2]
    if name == b"GET" and end in _CACHES:
        return lambda later: later[0].upper() == b"SET" and later[1] == key
    if (name == b"SET" and b"NX" in command) or (name == b"EVALSHA" and end == b"rescuer"):
        after = _ENDS.get(end, WHOLE)
        return lambda later: bool(after) and len(later) > 1 and after in later[1]
    return None


def _trips(part: Sequence[Seen]) -> tuple[tuple[Command, ...], ...]:
    trips: list[list[Command]] = []
    latest = float("-inf")
    for one in part:
        if one.at - latest > TRIP_SECONDS or not trips:
            trips.append([])
        trips[-1].append(one.arguments)
        latest = one.at
    return tuple(map(tuple, trips))


def is_due(gate: Command, reply: Any) -> bool:
    """Return whether the work after a gate is this worker's. Pure."""
    if gate[0].upper() == b"GET":
        return reply is None
    return bool(reply[0]) if isinstance(reply, list) else reply is not None


class Line(asyncio.Protocol):
    """A connection: replies in their order; what comes unasked goes to `told`."""

    def __init__(self) -> None:
        self.told: Callable[[], None] | None = None
        self._reader = hiredis.Reader(encoding=None)
        self._asked: deque[asyncio.Future[Any]] = deque()
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """Keep the way to Redis."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Give each reply to who has asked."""
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            is_push = isinstance(reply, hiredis.PushNotification) and reply[0] not in _SUBSCRIBED
            if is_push or not self._asked:
                if self.told:
                    self.told()
            elif not (asked := self._asked.popleft()).done():
                asked.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what is asked."""
        for one in self._asked:
            if not one.done():
                one.set_exception(exc or ConnectionError("Redis has closed the connection"))

    async def ask(self, commands: Sequence[Command]) -> Any:
        """Send commands together; return the last one's reply, which may be an error."""
        loop = asyncio.get_running_loop()
        asked = [loop.create_future() for _ in commands]
        self._asked.extend(asked)
        self._transport.writelines([hiredis.pack_command(command) for command in commands])
        for one in asked:
            reply = await one
        return reply

    def close(self) -> None:
        """Close it."""
        if self._transport:
            self._transport.close()


@dataclass
class Counts:
    """What simulated workers have done: `late` is in seconds, one for each piece of work."""

    fetches: int = 0
    taken: int = 0
    refused: int = 0
    late: list[float] = field(default_factory=list)


class SimulatedWorker:
    """One client that behaves as the recorded worker; `number` makes it another one."""

    def __init__(self, made: Recording, number: int, counts: Counts, queue: str) -> None:
        self._made = made
        self._counts = counts
        self._own = b"simulated-%d:1" % number
        self._fetcher = uuid.uuid4().hex.encode()
        self._queue = queue.encode()
        self._acks: list[bytes] = []
        self._fetches = 0
        self._lines: list[Line] = []
        self._wake = asyncio.Event()

    async def run(self, url: str) -> None:
        """Work until cancelled. `url` is that of a plain Redis with a password."""
        at, loop = urlsplit(url), asyncio.get_running_loop()
        try:
            for _ in self._made.set_ups:
                _, one = await loop.create_connection(Line, at.hostname, at.port)
                self._lines.append(one)
                await one.ask([(b"AUTH", (at.password or "").encode())])
            await self._set_up()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._repeat())
                group.create_task(self._receive())
        finally:
            for one in self._lines:
                one.close()

    async def _set_up(self) -> None:
        """Set connections up as the worker did, the one that is woken first."""
        made, ear = self._made, self._lines[self._made.ear]
        own_id = await ear.ask([(b"CLIENT", b"ID")])
        order = sorted(range(len(self._lines)), key=lambda number: number != made.ear)
        for number in order:
            for command in made.set_ups[number]:
                redirected = b"REDIRECT" in command
                place = command.index(b"REDIRECT") + 1 if redirected else 0
                words = list(command)
                if redirected:
                    words[place] = b"%d" % own_id
                await self._lines[number].ask([tuple(words)])
        ear.told = self._wake.set

    async def _repeat(self) -> None:
        """Repeat the recording, from a random moment of it."""
        seconds, bursts = self._made.seconds, sorted(self._made.bursts, key=lambda one: one.at)
        first = random.random() * seconds  # noqa: S311 - spreads workers
        began, bursts_left = time.monotonic() - first, [one for one in bursts if one.at >= first]
        while True:
            for burst in bursts_left:
                await asyncio.sleep(began + burst.at - time.monotonic())
                self._counts.late.append(max(0.0, time.monotonic() - began - burst.at))
                await self._do(burst)
            began, bursts_left = began + seconds, bursts

    async def _do(self, burst: Burst) -> None:
        line, reply, gate = self._lines[burst.connection], None, None
        for part in burst.parts:
            if part.gated and gate is not None and not is_due(gate, reply):
                continue
            for trip in part.trips:
                reply = await line.ask([self._as_own(command) for command in trip])
                gate = trip[-1]
                self._counts.refused += isinstance(reply, Exception)

    def _as_own(self, command: Command) -> Command:
        identity = self._made.identity
        return tuple(word.replace(identity, self._own) for word in command)

    async def _receive(self) -> None:
        """Fetch messages when woken, and each second: the recorded worker's own rhythm."""
        line = self._lines[self._made.fetching]
        while True:
            self._wake.clear()
            self._fetches += 1
            self._counts.fetches += 1
            tag = b"%s:%d" % (self._fetcher, self._fetches)
            acks, self._acks = self._acks, []
            exhausted, _, *found = await line.ask([self._fetch(tag, acks)])
            self._acks = [b"%s:%d" % (tag, n + 1) for n in range(len(found) // 2)]
            self._counts.taken += len(self._acks)
            if exhausted and not self._acks:
                try:
                    async with asyncio.timeout(1.0):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    def _fetch(self, tag: bytes, acks: Sequence[bytes]) -> Command:
        """Return the recorded fetch as this worker's own, of the queue of simulated workers."""
        evalsha, digest, keys, *words = self._made.fetch
        count = int(keys)
        lists, args = words[:count], words[count:]
        queue, mark = lists[0], args[3].rpartition(b":")[0]
        own = [*args[:3], mark + b":" + self._fetcher, tag, *args[5:12]]
        names = (name.replace(queue, self._queue, 1) for name in lists)
        return (evalsha, digest, keys, *names, *own, args[12].replace(queue, self._queue), *acks)
