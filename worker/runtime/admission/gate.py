"""What one event loop knows of the fleet's limits, and its calls of the admission script.

Operations of one turn of the loop share one call. Who is admitted by it is dispatched here.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from stepfleet.orchestrator.errors import AgentException, StoreError
from stepfleet.orchestrator.limits.budgets import NOTHING, Spending
from stepfleet.orchestrator.limits.limit import (
    RUN,
    SEPARATOR,
    Limit,
    is_limited,
    kind_of,
    learns,
)
from stepfleet.orchestrator.models.rate_headers import standings
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.records.ledger import CallState, LedgerRow
from stepfleet.orchestrator.store.admission import (
    FAILED,
    PAUSED,
    AdmissionReply,
    GrantRequest,
    Operation,
    basing,
    throttling,
)
from stepfleet.orchestrator.store.ledger import EPOCH, Ledger
from stepfleet.orchestrator.store.store import Store
from stepfleet.worker.runtime.admission.learning import Learning

log = logging.getLogger(__name__)

MOST_TOGETHER = 100
"""Operations of one call: a script must not hold up Redis."""
MOST_LOOKED_FOR = MOST_PAUSES = 1000
LOOKS_PER_SECOND = 320
ERRORS = (AgentException, RedisError, OSError)


@dataclass(slots=True)
class UsedGrant:
    """The grant of a call that this process makes, to `model`."""

    hint: Work
    model: str = ""
    key: str = ""
    early: asyncio.TimerHandle | None = None
    """Settles it while the step's tools run."""
    ends: Sequence[Operation] = ()
    """What it then sends."""
    names: tuple[str, ...] = ()
    spending: Spending = NOTHING
    """What it has reserved of the budgets of `names`."""
    is_called: bool = False
    has_summary: bool = False
    """Whether an earlier grant of the step has paid for its summary."""
    is_left: bool = False
    """Whether its step was not held here at the last look."""


class Gate:
    """Requests grants, and knows which of them this process uses."""

    def __init__(self, opened: Store, caller: str) -> None:
        self.calls = opened.admission(caller)
        self.settings = opened.limits
        self.limits: Mapping[str, Limit] = {}
        self.version = ""
        self.waiting = 0
        self.held: dict[str, UsedGrant] = {}
        self.counts_tokens = False
        """Whether a limit counts tokens, or their price."""
        self.has_budgets = False
        self.has_times = False
        """Whether a budget is of active time."""
        self.has_runs = False
        """Whether runs have budgets of their own."""
        self.wake = asyncio.Event()
        self.wakes_at = float("inf")
        """When this process is to admit again (monotonic seconds)."""
        self.stranded = False
        """Whether runs wait that nobody has looked after."""
        self.wiped = False
        """Whether the limits that this process knows are gone from Redis."""
        self.crash = opened.crash
        self.learning = Learning(time.monotonic)
        self._reloading: asyncio.Task[None] | None = None
        self._baselines = Baselines(opened.ledger, opened.settings.ledger_days)
        self._pauses: dict[str, asyncio.Future[str]] = {}
        self._looked_for: dict[str, asyncio.Task[None]] = {}
        self._dispatch = opened.dispatch
        self._grace = opened.settings.grace
        self._pending: list[tuple[Operation, asyncio.Future[str]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsent: dict[Work, str] = {}

    @property
    def active(self) -> bool:
        """Whether there are limits, or steps that wait for some that there were."""
        return bool(self.limits or self.waiting or self.stranded or self._unsent)

    @property
    def look_seconds(self) -> float:
        """After how long a step that waits is looked for in its line; longer the more of them wait.

        So the looks at all of them together cost Redis some thousandths of its time.
        """
        return max(self._grace, self.waiting / LOOKS_PER_SECOND)

    @property
    def estimates_tokens(self) -> bool:
        """Whether a limit counts tokens, or an answer has stated one that does."""
        return self.counts_tokens or self.learning.counts_tokens

    async def lost_among(self, run_ids: Sequence[str]) -> list[str]:
        """Return those runs that neither wait in a line nor have a grant. Raises `StoreError`."""
        return await self.calls.lost_among(run_ids)

    def call(self, operation: Operation) -> "asyncio.Future[str]":
        """Return the future of the script's word on an operation; it may fail with `StoreError`."""
        reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._send)
        self._pending.append((operation, reply))
        return reply

    def note_headers(self, limit: str, headers: Mapping[str, str], seconds: float) -> None:
        """Note what an answer's headers state of its limits; `seconds` it took."""
        self.learning.answered(limit)
        if (found := standings(headers)) and SEPARATOR not in limit and learns(self.limits, limit):
            known = is_limited(self.limits, limit)
            given = self.learning.stated(limit, found, seconds, is_limited=known)
            if given is not None:
                self.end([given])

    def may_hold(self, hint: Work) -> bool:
        """Whether the call of a step that is claimed now may have to wait for a grant.

        Later steps than the first have one as a rule: it was requested with the commit before.
        """
        return self.active and hint.step == 0

    async def may_call(
        self, limit: str, waits: Callable[[], Awaitable[None]] | None = None
    ) -> bool:
        """Wait for a model's turn, where nothing is known of it; False: it has just refused.

        Where there is something to wait for, `waits` is awaited before.
        """
        if self.learning.holds(limit):
            return False
        if is_limited(self.limits, limit) or (turn := self.learning.turn(limit)) is None:
            return True
        if waits is not None:
            await waits()
        await turn
        return not (is_limited(self.limits, limit) or self.learning.holds(limit))

    def note_refusal(
        self,
        limit: str,
        retry_after: float | None,
        seconds: float,
        stated: Mapping[str, float] | None = None,
    ) -> None:
        """Let the fleet know that a model has refused; one without a limit gets one."""
        # A separator is in no limit's name.
        if SEPARATOR in limit or not learns(self.limits, limit):
            self._pauses.pop(limit, None)
            return
        if len(self._pauses) >= MOST_PAUSES:
            self._pauses.clear()
        known = self.learning.refused(limit, stated, is_limited=is_limited(self.limits, limit))
        self._pauses[limit] = self.call(throttling(limit, retry_after, seconds, known))
        self._pauses[limit].add_done_callback(_received)

    async def pauses(self, limit: str) -> bool:
        """Return whether the fleet waits with a refused call; False: the call waits alone.

        It does so too where the script cannot be asked.
        """
        if (pause := self._pauses.get(limit)) is not None:
            with contextlib.suppress(*ERRORS):
                return await asyncio.shield(pause) == PAUSED
        return False

    def use(self, request: GrantRequest, model: str, key: str = "") -> UsedGrant:
        """Note a grant that is used here: it is renewed."""
        spending = request.amounts.spending or NOTHING
        key = key or request.key
        used = UsedGrant(request.hint, model, key, names=request.names, spending=spending)
        self.held[request.hint.run_id] = used
        return used

    def forget(self, hint: Work) -> None:
        """Renew a grant no more."""
        used = self.held.get(hint.run_id)
        if used is not None and used.hint == hint:
            del self.held[hint.run_id]
            if used.early is not None:
                used.early.cancel()

    def end(self, operations: Sequence[Operation]) -> None:
        """Send what ends a grant; nobody waits for it: one that is not settled expires."""
        for operation in operations:
            self.call(operation).add_done_callback(_received)

    def end_later(self, hint: Work, seconds: float, operations: Sequence[Operation]) -> None:
        """Do so after so many seconds, unless the step is committed before."""
        used = self.held.get(hint.run_id)
        if used is None or used.hint != hint or used.early is not None:
            return

        def settle() -> None:
            self.forget(hint)
            self.end(operations)

        used.ends = operations
        used.early = asyncio.get_running_loop().call_later(seconds, settle)

    async def reload(self) -> None:
        """Read the limits. Raises `StoreError`."""
        version, limits = await self.settings.known()
        if version != self.version:
            self.version, self.limits = version, limits
            self._summarize()
            log.info("limits of the fleet: %s", ", ".join(limits) or "none")

    def _summarize(self) -> None:
        fields = {field for one in self.limits.values() for field in one.model_fields_set}
        self.counts_tokens = any("token" in field or "usd" in field for field in fields)
        self.has_budgets = any(one.budgets for one in self.limits.values())
        self.has_times = any("active" in field for field in fields)
        self.has_runs = any(kind_of(name) == RUN for name in self.limits)

    async def look_for(self, name: str) -> None:
        """Read the limits, once, for one that a run was submitted with: it may be new."""
        if name in self.limits:
            return
        looking = self._looked_for.get(name)
        if looking is None:
            if len(self._looked_for) >= MOST_LOOKED_FOR:
                del self._looked_for[next(iter(self._looked_for))]
            looking = self._looked_for[name] = asyncio.create_task(self.reload())
        try:
            await asyncio.shield(looking)
        except ERRORS as error:  # the next command of the step meets the same trouble
            log.debug("limits: %s", error)
            self._looked_for.pop(name, None)

    async def aclose(self) -> None:
        """Finish the calls under way."""
        for used in list(self.held.values()):
            self.forget(used.hint)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=1.0)

    def _send(self) -> None:
        pending, self._pending = self._pending, []
        for at in range(0, len(pending), MOST_TOGETHER):
            self._keep(asyncio.create_task(self._answer(pending[at : at + MOST_TOGETHER])))

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring(self, reading: Coroutine[Any, Any, list[Operation]]) -> None:
        """Bring what the ledger has of budgets; where it cannot be read, later calls ask again."""
        try:
            self.end(await reading)
        except ERRORS as error:
            log.warning("budgets wait for the ledger: %s", error)

    async def _answer(self, pending: list[tuple[Operation, asyncio.Future[str]]]) -> None:
        try:
            answer = await self.calls.call([operation for operation, _ in pending])
            await self._apply(answer)
        except Exception as error:  # noqa: BLE001 - each caller gets it
            for _, reply in pending:
                if not reply.done():
                    reply.set_exception(error)
            return
        for word, (operation, reply) in zip(answer.words, pending, strict=True):
            if reply.done():
                continue
            if word.startswith(FAILED):
                log.warning("a call under limits cannot be noted (%s): %s", operation["op"], word)
                reply.set_exception(StoreError(word))
            else:
                reply.set_result(word)
        if answer.admitted:
            self.crash("limits-admitted")
            await self._publish(answer.admitted)

    async def publish_again(self) -> None:
        """Dispatch admitted steps that the broker has not taken before."""
        unsent, self._unsent = tuple(self._unsent.items()), {}
        if unsent:
            await self._publish(unsent)

    async def _publish(self, admitted: Sequence[tuple[Work, str]]) -> None:
        try:
            await self._dispatch.publish(admitted)
        except Exception as error:  # noqa: BLE001 - whatever a broker raises
            level = logging.DEBUG if self._unsent else logging.WARNING
            log.log(level, "admitted steps wait for the broker: %s", error)
            self._unsent.update(admitted)

    async def _apply(self, answer: AdmissionReply) -> None:
        self.waiting = answer.waiting
        if answer.missing and (operations := self._baselines.wanted(answer.missing)):
            self._keep(asyncio.create_task(self._bring(operations)))
        if answer.mine:
            soon = time.monotonic() + (1.0 if answer.pause is None else answer.pause)
            if soon < self.wakes_at:
                self.wakes_at = soon
                self.wake.set()
        self.wiped = bool(self.version and not answer.version)
        if self.wiped:
            self.wakes_at = 0.0
            self.wake.set()
        for _ in range(2):  # those who read them already may have read an older version
            if answer.version and answer.version != self.version:
                await self._reload_together()

    async def _reload_together(self) -> None:
        """Read the limits, or wait for those who read them: steps go on with what is known then."""
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.create_task(self.reload())
        with contextlib.suppress(*ERRORS):
            await asyncio.shield(self._reloading)


def _received(reply: "asyncio.Future[str]") -> None:
    if not reply.cancelled():
        reply.exception()


class Baselines:
    """Reads what the ledger has of names whose budgets are new, or whose numbers in Redis are lost.

    Once for all that are wanted together.
    """

    def __init__(self, ledger: Ledger, days: int) -> None:
        self._ledger = ledger
        self._days = days
        self._wanted: set[str] = set()

    def wanted(self, names: Iterable[str]) -> Coroutine[Any, Any, list[Operation]] | None:
        """Return what reads the ledger for these; None where it is being read: they ask again."""
        is_reading = bool(self._wanted)
        self._wanted.update(names)
        return None if is_reading else self._read()

    async def _read(self) -> list[Operation]:
        """Return the operations that bring the sums. Raises `StoreError`."""
        try:
            today = await self._ledger.today()
            found: dict[str, tuple[Spending, Spending]] = {}
            names = frozenset(self._wanted)
            async for of, row in self._ledger.rows_of(names, self._days):
                spent = _spent(row)
                for name in of:
                    whole, of_day = found.get(name, (Spending(), Spending()))
                    found[name] = (whole + spent, of_day + spent if row.day == today else of_day)
        finally:
            self._wanted.clear()
        nothing = (Spending(), Spending())
        number = (today - EPOCH).days
        return [basing(name, *found.get(name, nothing), number) for name in sorted(names)]


def _spent(row: LedgerRow) -> Spending:
    """Return what a row has spent; answers from the response cache are free."""
    sums = row.sums
    if row.state == CallState.CACHED:
        return Spending()
    return Spending(sums.cost, sums.input_tokens + sums.output_tokens, sums.calls)
