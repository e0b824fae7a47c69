"""Calls that wait for a person: a page of them over all shards, and their decisions."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from heapq import merge
from typing import Any

from pydantic import ValidationError

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.protocol.attempt import Wait
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.protocol.waiting import Arrived, decided_event
from stepfleet.orchestrator.records.calls.answers import (
    Answer,
    Ask,
    AskCount,
    Awaited,
    Decision,
    awaited_by,
)
from stepfleet.orchestrator.records.calls.tools import ToolCall
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.state import TERMINAL, HandOff
from stepfleet.orchestrator.store.codec import WAIT, Fields, awaited_calls, load_wait, moment
from stepfleet.orchestrator.store.compression import unpacked
from stepfleet.orchestrator.store.gateway import Gateway, Opened
from stepfleet.orchestrator.store.runs.submission import call_at
from stepfleet.orchestrator.store.runs.tool_calls import ToolCalls

MOST = 1000
"""Calls of a page."""
_AT_ONCE = 50
"""Runs whose answers of models are in memory at once."""
MOST_COUNTED = 1_000
LOOKED_AT = 5_000
"""Calls among which those of a batch, or of some runs, are counted: those that wait longest."""
_TOGETHER = 500
_OLDEST = 100
_NAMES = ("status", "agent", "batch", "billed", "line", "tenant", "slim", *WAIT)
_OVER = frozenset(one.value for one in TERMINAL)
_Place = tuple[float, str]


@dataclass(frozen=True, slots=True)
class Waits:
    """A call that waits for a person, with what a decision needs to reach it."""

    ask: Ask
    execution: int

    @property
    def hint(self) -> Work:
        """The call."""
        return Work(self.ask.run_id, self.ask.step - 1, self.ask.index)


@dataclass(frozen=True, slots=True)
class AskFigures:
    """How many calls wait for people, and since when the oldest does (Unix time in ms), if any.

    Calls of runs that were cancelled count until somebody lists what waits.
    """

    count: int
    oldest: float | None


class ApprovalStore(Gateway):
    """Reads calls that wait for people, and answers them."""

    def __init__(self, opened: Opened, calls: ToolCalls) -> None:
        super().__init__(opened)
        self._calls = calls

    async def page(self, limit: int, cursor: str | None) -> tuple[list[Waits], str | None]:
        """Return up to `limit` calls, those first that wait longest, and the next page's cursor.

        Members of the index whose call waits no longer are removed from it.
        """
        if not isinstance(limit, int) or not 1 <= limit <= MOST:
            raise ConfigurationError(f"limit is {limit!r}; write a number from 1 to {MOST}")
        place = _place(cursor) if cursor else None
        shards = [f"{self._keys.tag(n)}asks" for n in range(self._keys.shards)]
        first = f"{place[0]:.0f}" if place else "-inf"
        # Many may have begun in one millisecond: those of the cursor's time are read with it.
        replies = await self._connection.execute_all(
            *(
                ("ZRANGEBYSCORE", k, first, "+inf", "WITHSCORES", "LIMIT", 0, limit + MOST)
                for k in shards
            )
        )
        each = (sorted(_pairs(reply)) for reply in replies)
        found = [one for one in merge(*each) if place is None or one > place]
        taken = found[:limit]
        waits: list[Waits] = []
        for at in range(0, len(taken), _AT_ONCE):
            waits += await self._read(taken[at : at + _AT_ONCE])
        more = len(found) > limit
        return waits, f"{taken[-1][0]:.0f} {taken[-1][1]}" if more else None

    async def of_run(self, run_id: str) -> list[Waits]:
        """Return the calls of one run that wait for people."""
        key = self._keys.run(run_id)
        header = _header(WAIT, await self._connection.execute("HMGET", key, *WAIT))
        indexes = [w.index for w in awaited_calls(header) if _asks(w.queue)]
        members = [f"{header['step']} {index} {run_id}" for index in indexes]
        name = f"{self._keys.tag(self._keys.shard_of(run_id))}asks"
        scores = await self._connection.execute_all(*(("ZSCORE", name, one) for one in members))
        return await self._read([(float(s or 0), m) for s, m in zip(scores, members, strict=True)])

    async def figures(self) -> AskFigures:
        """Return how many calls wait for people: two small commands for each shard."""
        names = [f"{self._keys.tag(shard)}asks" for shard in range(self._keys.shards)]
        run = self._connection.execute_all
        counts = await run(*(("ZCARD", name) for name in names))
        firsts = await run(*(("ZRANGE", name, 0, 0, "WITHSCORES") for name in names))
        return AskFigures(sum(counts), min((float(one[1]) for one in firsts if one), default=None))

    async def oldest(self) -> list[Ask]:
        """Return the calls that have waited longest for people, a hundred at most."""
        found, _ = await self.page(_OLDEST, None)
        return [one.ask for one in found]

    async def made(self, run_id: str) -> dict[int, Decision]:
        """Return the decisions of a run's open step, by the places of its calls."""
        key = f"{self._keys.run(run_id)}:journal"
        names = [n for n in await self._connection.execute("HKEYS", key) if n.startswith("a:")]
        texts = await self._connection.execute("HMGET", key, *names) if names else ()
        answers = {n: Answer.from_json(text) for n, text in zip(names, texts, strict=True) if text}
        return {int(n[2:]): one.decision for n, one in answers.items() if one.decision}

    async def count_of_batch(self, batch_id: str) -> AskCount:
        """Return how many calls of a batch's runs, and of the runs below these, wait for people."""
        calls, more = await self._oldest()
        return await self._count(calls, more, batch_id)

    async def count_of_runs(self, run_ids: Sequence[str]) -> AskCount:
        """Return how many calls of these runs, and of the runs below them, wait for people."""
        keys = map(self._keys.run, run_ids)
        heads = await self._connection.execute_all(*(("HMGET", k, *WAIT) for k in keys))
        places = (one.queue for head in heads for one in awaited_calls(_header(WAIT, head)))
        if all(awaited_by(place) is None for place in places):
            return AskCount()
        calls, more = await self._oldest()
        below = tuple(f"{one}." for one in run_ids)
        meant = [one for one in calls if f"{one.run_id}.".startswith(below)]
        return await self._count(meant, more)

    async def _oldest(self) -> tuple[list[Work], bool]:
        """Return the calls that have waited longest, and whether there may be others."""
        shards = [f"{self._keys.tag(n)}asks" for n in range(self._keys.shards)]
        each = max(LOOKED_AT // len(shards), 1)
        found = await self._connection.execute_all(
            *(("ZRANGE", key, 0, each - 1) for key in shards)
        )
        more = any(len(members) == each for members in found)
        return [call_at(one) for members in found for one in members], more

    async def _count(self, calls: Sequence[Work], more: bool, batch_id: str = "") -> AskCount:
        found = 0
        fields = (*WAIT, "status", "batch", "billed")
        for at in range(0, len(calls), _TOGETHER):
            some = calls[at : at + _TOGETHER]
            keys = (self._keys.run(one.run_id) for one in some)
            heads = await self._connection.execute_all(*(("HMGET", k, *fields) for k in keys))
            for call, head in zip(some, heads, strict=True):
                header = _header(fields, head)
                is_meant = not batch_id or batch_id in (header.get("batch"), header.get("billed"))
                found += is_meant and _ask_of(header, call) is not None
            if found >= MOST_COUNTED:
                return AskCount(count=MOST_COUNTED, more=True)
        return AskCount(count=found, more=more)

    async def decide(self, waits: Waits, decision: Decision) -> Arrived:
        """Give a call its decision; the first one counts."""
        ask = waits.ask
        call = ToolCall(id=ask.call_id, name=ask.tool)
        at = decision.at or ask.since
        event = decided_event(waits.hint, waits.execution, call, decision, at)
        answer = Answer(decision=decision)
        reply = await self._calls.answer(waits.hint, ask.key, answer, ask.agent, Events([event]))
        is_own = reply.first == answer.to_json()  # the reply to the first call was lost
        return Arrived(applied=True) if is_own else reply

    async def _read(self, members: Sequence[_Place]) -> list[Waits]:
        calls = [call_at(member) for _, member in members]
        keys = [self._keys.run(one.run_id) for one in calls]
        heads = self._connection.execute_all(*(("HMGET", key, *_NAMES) for key in keys))
        fields = (
            ("HMGET", f"{key}:journal", "response", f"k:{c.index}", f"t:{c.index}")
            for key, c in zip(keys, calls, strict=True)
        )
        headers, journals = await asyncio.gather(heads, self._connection.execute_all(*fields))
        found = []
        for (score, _), call, head, journal in zip(members, calls, headers, journals, strict=True):
            header = _header(_NAMES, head)
            wait = _ask_of(header, call)
            if wait is None or not all(journal[:2]):
                await self._scripts.run("unask", call.run_id, call.step, call.index)
            elif (made := _waits(call, header, wait, score, journal)) is not None:
                found.append(made)
        return found


def _header(names: Sequence[str], values: Sequence[str | None]) -> Fields:
    return {n: value for n, value in zip(names, values, strict=True) if value is not None}


def _ask_of(header: Fields, call: Work) -> Wait | None:
    """Return the call, where it still waits for a person."""
    is_open = header.get("step") == str(call.step) and header.get("status") not in _OVER
    waits = awaited_calls(header) if is_open else ()
    return next((w for w in waits if w.index == call.index and _asks(w.queue)), None)


def _waits(
    call: Work, header: Fields, wait: Wait, score: float, journal: Sequence[Any]
) -> Waits | None:
    try:
        response = LLMResponse.from_json(journal[0])
        execution = HandOff.model_validate_json(unpacked(header["slim"])).info.execution
    except (ValidationError, ValueError):
        return None
    calls, index = response.tool_calls or (), call.index
    if index is None or index >= len(calls):
        return None
    made = calls[index]
    asked = Ask(
        run_id=call.run_id,
        step=call.step + 1,
        index=index,
        key=journal[1],
        call_id=made.id,
        kind="question" if wait.queue == Awaited.PERSON else "approval",
        agent=header["agent"],
        tool=made.name,
        arguments=made.arguments,
        since=moment(f"{score:.0f}"),
        until=_until(header, journal[2]),
        batch_id=header.get("batch") or header.get("billed") or None,
        line_id=header.get("line") or None,
        tenant=header.get("tenant"),
    )
    return Waits(asked, execution)


def _until(header: Fields, own: str | None) -> datetime | None:
    """Return the earlier end: of the run's patience, or of the call's own time limit (ms)."""
    wait = load_wait(header)
    ends = wait and not wait.over and wait.deadline, moment(own) if own else None
    return min((end for end in ends if end), default=None)


def _asks(place: str) -> bool:
    awaited = awaited_by(place)
    return awaited is not None and awaited.by_people


def _pairs(reply: Sequence[str]) -> list[_Place]:
    return [(float(reply[i + 1]), reply[i]) for i in range(0, len(reply), 2)]


def _place(cursor: str) -> _Place:
    score, _, member = str(cursor).partition(" ")
    if not (score.isascii() and score.isdigit() and member):
        raise ConfigurationError("cursor is not one that a page has returned; leave it out")
    return float(score), member
