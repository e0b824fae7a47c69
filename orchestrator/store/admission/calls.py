"""Calls of the admission script, bound to records."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from stepfleet.orchestrator.limits.estimates import Amounts
from stepfleet.orchestrator.protocol.claim import StepHint
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.lua import run_script

Operation = dict[str, Any]
GRANTED = "granted"
TICK: Operation = {"op": "tick"}


@dataclass(frozen=True, slots=True)
class Request:
    """A step that is to call its model: `names` are its limits, the first one is its line."""

    hint: StepHint
    agent: str
    tenant: str
    names: tuple[str, ...]
    amounts: Amounts
    fresh: bool = False

    def operation(self, op: str) -> Operation:
        """Return the operation `try`, `ask` or `again` of the script."""
        return {
            **_of(op, self.hint),
            "agent": self.agent,
            "tenant": self.tenant,
            "names": self.names,
            "amounts": self.amounts.stored(),
            "fresh": self.fresh,
        }


def settling(hint: StepHint, amounts: Amounts | None = None) -> Operation:
    """Return the operation that ends a grant; without `amounts` what was reserved is charged."""
    operation = _of("settle", hint)
    return operation if amounts is None else operation | {"amounts": amounts.stored()}


def refunding(hint: StepHint) -> Operation:
    """Return the operation that ends a grant and gives all of it back."""
    return _of("refund", hint)


def renewing(hint: StepHint) -> Operation:
    """Return the operation with which a grant goes on."""
    return _of("renew", hint)


def throttling(name: str, seconds: float | None) -> Operation:
    """Return the operation by which nobody calls under `name` for so long."""
    operation: Operation = {"op": "throttled", "names": (name,)}
    return operation if seconds is None else operation | {"ms": round(seconds * 1000)}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the script has decided.

    `admitted` are steps to dispatch, with their agents. After `pause` seconds something may be
    admitted (None: when a call ends); `waiting` steps wait in all. `version` is that of the limits.
    `mine`: the caller comes back by then.
    """

    words: tuple[str, ...]
    admitted: tuple[tuple[StepHint, str], ...]
    pause: float | None
    waiting: int
    version: str
    mine: bool


@dataclass(frozen=True, slots=True)
class Grant:
    """The leave of one step to call its model. It waited for `waited` seconds, for `why`."""

    step: int
    waited: float = 0.0
    why: str = ""


class AdmissionCalls:
    """Asks the script for leave. `lease` is how long a grant holds without a renewal, in s."""

    def __init__(self, connection: Connection, found: Keys, caller: str, lease: float) -> None:
        self._connection = connection
        self._keys = found
        self._given = (caller, round(lease * 1000))

    async def call(self, operations: Sequence[Operation]) -> Answer:
        """Apply operations in their order, and admit who can be. Raises `StoreError`."""
        state = [self._keys.of(keys.LIMIT_STATE)]
        shown = orjson.dumps(operations).decode()
        reply = await run_script(self._connection, "admit", state, *self._given, shown)
        words, flat, pause, waiting, version, mine = reply
        triples = zip(*[iter(flat)] * 3, strict=True)
        return Answer(
            tuple(words),
            tuple((StepHint(run, int(step)), agent) for run, step, agent in triples),
            None if int(pause) < 0 else int(pause) / 1000,
            int(waiting),
            str(version),
            bool(mine),
        )

    async def grant(self, run_id: str) -> Grant | None:
        """Return the grant that a run has. Raises `StoreError`."""
        text = await self._connection.execute("HGET", self._keys.of(keys.LIMIT_GRANTS), run_id)
        if not text:
            return None
        stored = orjson.loads(text)
        return Grant(stored["step"], stored.get("waited", 0) / 1000, stored.get("why", ""))


def _of(op: str, hint: StepHint) -> Operation:
    return {"op": op, "run": hint.run_id, "step": hint.step}
