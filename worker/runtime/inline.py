"""Runs steps in the caller's own process, without Celery: the same step over the same store.

For notebooks, debugging and tests: results equal the fleet's, and a run may change hands between
this and real workers at any step.
"""

import asyncio
import base64
import logging
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Self

import orjson
from redis.asyncio import Redis
from redis.exceptions import RedisError

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.protocol.attempt import Wait
from stepfleet.orchestrator.protocol.claim import Refused, Work
from stepfleet.orchestrator.protocol.verdict import Move
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.codec import awaited_calls
from stepfleet.orchestrator.store.dispatch import client_app
from stepfleet.orchestrator.store.runs.reading import StoredRun
from stepfleet.worker.engine.loop_thread import LoopThread
from stepfleet.worker.engine.messages import Inadmissible, work_in
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.runtime.worker import Worker
from stepfleet.worker.step import Report
from stepfleet.worker.toolbox.threads import ToolThreads

log = logging.getLogger(__name__)

WAITING = frozenset({Refused.EARLY, Refused.LEASED, Refused.LIMITED})
LONGEST_WAIT = 1.0
START_SECONDS = 60.0
STOP_SECONDS = 10.0
POP_SECONDS = 0.2
"""How long a read of the queues waits; it is not cancelled, as it may have a message."""


class InlineWorker:
    """Does the steps of given runs here: `async with InlineWorker(settings, agents) as worker`.

    With `stepping` it is for a person: tools run in the thread of the event loop, where debuggers
    work, without time limits, and nothing runs beside them.
    """

    def __init__(
        self, settings: Settings, agents: Iterable[Agent], *, stepping: bool = False
    ) -> None:
        self._app = client_app(settings)
        threads = ToolThreads(1, patient=True, inline=True) if stepping else None
        given = (settings, agents, self._app, Leases(time.monotonic))
        self._opening = Worker.open(*given, consumes=not stepping, threads=threads)

    async def __aenter__(self) -> Self:
        """Connect. Raises `StoreError` when Redis cannot be reached."""
        self._worker = await self._opening.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect."""
        await self._opening.__aexit__(None, None, None)
        self._app.close()

    async def finish(self, *run_ids: str) -> None:
        """Do steps of these runs, all at once, until each has ended or is paused."""
        await asyncio.gather(*(self._finish(run_id) for run_id in run_ids))
        await self._worker.settle()

    async def step(self, run_id: str) -> tuple[Report, StoredRun] | None:
        """Do the run's next step, as soon as it may begin; return it, and the run after it.

        Returns None for a run that has ended or is paused. Calls on queues of their own are part
        of the step.
        """
        while (run := await self._open(run_id)) is not None:
            report = await self._attempt(run)
            moved = report.verdict if report else None
            if report and moved and moved.move is not Move.WAIT:
                return report, await self._run(run_id)
        return None

    async def _finish(self, run_id: str) -> None:
        while (run := await self._open(run_id)) is not None:
            await self._attempt(run)

    async def _attempt(self, run: StoredRun) -> Report | None:
        """Do a step, or the calls that it waits for; wait where neither may begin yet."""
        run_id, step = run.run_id, run.step
        waits = awaited_calls(run.header)
        if waits and await self._make_calls(run_id, step, waits):
            return None
        report = await self._worker.run(Work(run_id, step))
        if report.refusal and report.refusal.why in WAITING:
            await asyncio.sleep(min(int(report.refusal.detail) / 1000, LONGEST_WAIT))
        return report

    async def _make_calls(self, run_id: str, step: int, waits: Iterable[Wait]) -> bool:
        """Make the tool calls that a run waits for; return whether there was any."""
        made = [self._make_call(Work(run_id, step, one.index)) for one in waits]
        return any(await asyncio.gather(*made))

    async def _make_call(self, hint: Work) -> bool:
        report = await self._worker.run(hint)
        if report.attended and not await self._finish_child(hint):
            await asyncio.sleep(POP_SECONDS)  # others have it in hand
        return report.refusal is None

    async def _finish_child(self, hint: Work) -> bool:
        """Do the steps of the run that a call has started; return whether there is one to do."""
        store = self._worker.store
        journal = f"{store.keys.run(hint.run_id)}:journal"
        child = await store.connection.execute("HGET", journal, f"k:{hint.index}")
        known = child and await store.connection.execute("EXISTS", store.keys.run(child))
        if not known or await self._open(child) is None:
            return False
        await self._finish(child)
        return True

    async def _open(self, run_id: str) -> StoredRun | None:
        run = await self._run(run_id)
        status = run.state.status
        return None if status.is_terminal or status == "paused" else run

    async def _run(self, run_id: str) -> StoredRun:
        return await self._worker.store.runs.get(run_id)


class LocalWorker:
    """A worker in a thread of this process, on a private server that holds store and queues.

    It takes hints as Celery's workers do, and the others may be beside it. A hint that is lost
    with the process is sent again by whichever worker rescues its run. Tools have no time limits:
    a person may be at a prompt of theirs.
    """

    def __init__(self, settings: Settings, agents: Iterable[Agent]) -> None:
        self._settings = settings
        self._agents = tuple(agents)
        self._thread = LoopThread("stepfleet-worker")
        self._stack = AsyncExitStack()
        self._working: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect, and begin to work. Raises `StoreError` and `ConfigurationError`."""
        self._thread.start()
        begun = asyncio.run_coroutine_threadsafe(self._begin(), self._thread.loop)
        try:
            begun.result(START_SECONDS)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Hand open steps back, and end the thread."""
        self._thread.stop(self._end(), STOP_SECONDS)

    async def _begin(self) -> None:
        settings = self._settings
        self._app = client_app(settings)
        self._heavy = sorted({queue for agent in self._agents for queue in agent.queues})
        self._app.amqp.queues.select([settings.queue, *self._heavy])  # the heartbeat reports them
        self._leases = Leases(time.monotonic)
        threads = ToolThreads(settings.tool_threads, patient=True)
        given = (settings, self._agents, self._app, self._leases)
        opening = Worker.open(*given, threads=threads)
        self._worker = await self._stack.enter_async_context(opening)
        self._reading = asyncio.create_task(self._read())

    async def _end(self) -> None:
        if self._reading is None:
            return
        self._leases.draining = True
        self._leases.hand_back()
        await asyncio.gather(self._reading, return_exceptions=True)
        if self._working:
            await asyncio.wait(self._working, timeout=STOP_SECONDS / 2)
        await self._stack.aclose()
        self._app.close()

    async def _read(self) -> None:
        dispatch = self._worker.store.dispatch
        lists = [dispatch.key_of(queue) for queue in (dispatch.queue, *self._heavy)]
        async with Redis.from_url(self._settings.store, decode_responses=True) as client:
            while not self._leases.draining:
                try:
                    while len(self._working) >= self._settings.slots:
                        await asyncio.wait(self._working, return_when=asyncio.FIRST_COMPLETED)
                    taken = await client.brpop(lists, timeout=POP_SECONDS)
                except (RedisError, OSError) as error:
                    log.warning("the queue cannot be read: %s", error)
                    await asyncio.sleep(POP_SECONDS)
                    continue
                if taken is not None:
                    task = asyncio.create_task(self._work(str(taken[1])))
                    self._working.add(task)
                    task.add_done_callback(self._working.discard)

    async def _work(self, message: str) -> None:
        try:
            await self._worker.run(_work_in(message))
        except Inadmissible as error:
            log.warning("a message of the queue was dropped: %s", error)
        except (AgentException, RedisError, OSError) as error:
            log.warning("a step was put off: %s", error)


def _work_in(message: str) -> Work:
    """Return what a message of the broker names. Raises `Inadmissible`."""
    try:
        envelope = orjson.loads(message)
        args, kwargs, _ = orjson.loads(base64.b64decode(envelope["body"]))
        task = envelope["headers"]["task"]
    except (ValueError, TypeError, KeyError) as error:
        raise Inadmissible(f"it is not a task message: {error!r}") from None
    return work_in(task, args, kwargs)
