"""Calls of the admission script, bound to records."""

import asyncio
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.limits.budgets import Spending
from stepfleet.orchestrator.limits.estimates import Amounts
from stepfleet.orchestrator.limits.limit import NORMAL
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.gateway import Gateway, Opened
from stepfleet.orchestrator.store.limits import ENDED, state_of
from stepfleet.orchestrator.store.lua import run_script

Operation = dict[str, Any]
PAGE = 500
_OVER = ENDED | {"stopped"}
GRANTED, WAITS = "granted", "waits"
DONE = "done"
PAUSED = "paused"
FAILED = "failed: "
"""Before the error of one operation, which the others of its call do not share."""
TICK: Operation = {"op": "tick"}


@dataclass(frozen=True, slots=True)
class GrantRequest:
    """A step that is to call its model: `names` are its limits, the first one is its line.

    `crashes` workers were lost with it; with `lost` the newest of them has just been found. `of`
    names the model where it is not the agent's first. `key` tells its grant from others of the
    step.
    """

    hint: Work
    agent: str
    tenant: str
    names: tuple[str, ...]
    amounts: Amounts
    fresh: bool = False
    crashes: int = 0
    lost: bool = False
    priority: int = NORMAL
    of: str = ""
    key: str = field(default_factory=lambda: secrets.token_hex(4), compare=False)

    def operation(self, op: str) -> Operation:
        """Return the operation `try`, `ask` or `again` of the script."""
        return {
            **_of(op, self.hint),
            "agent": self.agent,
            "tenant": self.tenant,
            "names": self.names,
            "amounts": self.amounts.stored(),
            **({"crashes": self.crashes} if self.crashes else {}),
            **({"lost": 1, "id": _new_id()} if self.lost and op == "try" else {}),
            **({"of": self.of} if self.of else {}),
            "key": self.key,
            "class": 2 * self.priority + self.fresh,
        }

    def after(self, ended: Operation) -> Operation:
        """Return the operation `try` after a call of another model, which `ended` settles."""
        return self.operation("try") | {"ended": ended}


def settling(
    hint: Work,
    amounts: Amounts | None = None,
    spent: Spending | None = None,
    names: Collection[str] = (),
    key: str = "",
) -> Operation:
    """Return the operation that ends a grant; without `amounts` what was reserved is charged.

    `spent` is what budgets are charged; with `names` also where there is no grant any more. With a
    `key` no other grant of the step is ended.
    """
    operation = _of("settle", hint, key)
    if amounts is not None:
        operation["amounts"] = amounts.stored()
    if spent is not None:
        operation |= {"spent": spent.stored(), "names": tuple(names)}
    return operation


def refunding(hint: Work, key: str = "") -> Operation:
    """Return the operation that ends a grant, by its `key`, and gives all of it back."""
    return _of("refund", hint, key)


def renewing(hint: Work) -> Operation:
    """Return the operation with which a grant goes on."""
    return _of("renew", hint)


def losing(hint: Work, crashes: int) -> Operation:
    """Return the operation that charges the calls of workers which were lost with a step."""
    return _of("lost", hint) | {"crashes": crashes}


def charging(
    names: tuple[str, ...], amounts: Amounts | None, spent: Spending | None = None
) -> Operation:
    """Return the operation that charges limits of which the step has no grant."""
    operation: Operation = {"op": "charge", "names": names, "id": _new_id()}
    if amounts is not None:
        operation["amounts"] = amounts.stored()
    return operation if spent is None else operation | {"spent": spent.stored()}


def basing(name: str, whole: Spending, of_day: Spending, day: int) -> Operation:
    """Return the operation that brings what the ledger has of a name, in all and of one day."""
    sums = {"all": whole.stored(), "day": of_day.stored(), "today": day}
    return {"op": "base", "names": (name,), **sums}


def throttling(
    model: str, retry_after: float | None, seconds: float, known: Mapping[str, Any]
) -> Operation:
    """Return the operation by which nobody calls a model that has refused a call.

    The call was sent `seconds` ago. `known` is what this process knows of others (see `Learning`).
    """
    age = round(seconds * 1000)
    operation = {"op": "throttled", "names": (model,), "age": age, **known}
    return operation if retry_after is None else operation | {"ms": round(retry_after * 1000)}


@dataclass(frozen=True, slots=True)
class AdmissionReply:
    """What the script has decided.

    `admitted` are steps to dispatch, with their agents. After `pause` seconds something may be
    admitted (None: when a call ends); `waiting` steps wait in all. `version` is that of the limits.
    `mine`: the caller comes back by then. `missing` are names whose budgets need what the ledger
    has of them.
    """

    words: tuple[str, ...]
    admitted: tuple[tuple[Work, str], ...]
    pause: float | None
    waiting: int
    version: str
    mine: bool
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Grant:
    """The permission of one step to call its model. It waited for `waited` seconds, for `why`.

    `crashes` workers had been lost with the step before; `of` names the model where it is not the
    agent's first. `key` tells it from others of the step.
    """

    step: int
    waited: float = 0.0
    why: str = ""
    crashes: int = 0
    of: str = ""
    key: str = ""

    @classmethod
    def loaded(cls, text: str | None) -> "Grant | None":
        """Return what the script has stored; None for anything but a grant."""
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            stored = orjson.loads(text or "{}")
            return cls(
                stored["step"],
                stored.get("waited", 0) / 1000,
                stored.get("why") or "",
                stored.get("crashes") or 0,
                stored.get("of") or "",
                stored.get("key") or "",
            )
        return None


class AdmissionCalls(Gateway):
    """Requests grants of the script. `lease` is how long a grant holds without a renewal, in s."""

    def __init__(self, opened: Opened, caller: str) -> None:
        super().__init__(opened)
        self._given = (caller, round(opened.settings.lease * 1000))

    async def call(self, operations: Sequence[Operation]) -> AdmissionReply:
        """Apply operations in their order, and admit who can be. Raises `StoreError`."""
        state = [self._keys.of(keys.LIMIT_STATE)]
        given = (self._connection, "admit", state, *self._given)
        try:
            reply = await run_script(*given, _encoded(operations), once=True)
        except StoreError:  # it may have been applied
            again = [{**operation, "repeated": 1} for operation in operations]
            reply = await run_script(*given, _encoded(again))
        words, flat, pause, waiting, version, mine, missing = reply
        triples = zip(*[iter(flat)] * 3, strict=True)
        return AdmissionReply(
            tuple(words),
            tuple((Work(run, int(step)), agent) for run, step, agent in triples),
            None if int(pause) < 0 else int(pause) / 1000,
            int(waiting),
            str(version),
            bool(mine),
            tuple(missing),
        )

    def request_grant(self, run_id: str) -> "asyncio.Future[Any]":
        """Send the question for a run's grant; `Grant.loaded` reads the answer."""
        return self._connection.send("HGET", self._keys.of(keys.LIMIT_GRANTS), run_id)

    async def is_used(self) -> bool:
        """Return whether steps have grants or wait: without limits nobody looks after them."""
        names = map(self._keys.of, (keys.LIMIT_GRANTS, keys.LIMIT_WAITING))
        return bool(await self._connection.execute("EXISTS", *names))

    async def ended_among_waiting(self, at: str) -> tuple[str, list[Work]]:
        """Return where to go on, and steps with a place in a line whose runs are over.

        Reads some hundred places. Raises `StoreError`.
        """
        page = ("HSCAN", self._keys.of(keys.LIMIT_WAITING), at, "COUNT", PAGE)
        at, places = await self._connection.execute(*page)
        steps = {run: place.partition(" ")[0] for run, place in dict(places).items()}
        headers = (self._keys.run(run) for run in steps)
        found = await self._connection.execute_all(*(("HGET", key, "status") for key in headers))
        over = [run for run, one in zip(steps, found, strict=True) if one is None or one in _OVER]
        return str(at), [Work(run, int(steps[run])) for run in over if steps[run].isdigit()]

    async def lost_among(self, run_ids: Sequence[str]) -> list[str]:
        """Return those runs that neither wait in a line nor have a grant. Raises `StoreError`.

        Where a part of a line was lost, all count that have waited since before that.
        """
        if not run_ids:
            return []
        waiting, grants, [own] = await self._connection.execute_all(
            ("HMGET", self._keys.of(keys.LIMIT_WAITING), *run_ids),
            ("HMGET", self._keys.of(keys.LIMIT_GRANTS), *run_ids),
            ("HMGET", self._keys.of(keys.LIMIT_STATE), "*"),
        )
        lost_at = state_of(own).get("lost", -1)
        return [
            run
            for run, place, grant in zip(run_ids, waiting, grants, strict=True)
            if not grant and _since(place) <= lost_at
        ]


def _encoded(operations: Sequence[Operation]) -> str:
    """Return operations as the script reads them; those that cannot be written say so instead."""
    try:
        return orjson.dumps(operations).decode()
    except TypeError:
        return orjson.dumps([_sound(operation) for operation in operations]).decode()


def _sound(operation: Operation) -> Operation:
    try:
        orjson.dumps(operation)
    except TypeError as error:
        return {"op": "unsound", "why": str(error)}
    return operation


def _since(place: str | None) -> int:
    """Return since when a run waits by its place, in ms; -1 if it has none."""
    with suppress(ValueError, IndexError):
        return int(place.split(" ", 2)[1]) if place else -1
    return -1


def _new_id() -> str:
    return secrets.token_hex(8)


def _of(op: str, hint: Work, key: str = "") -> Operation:
    named: Operation = {"op": op, "run": hint.run_id, "step": hint.step}
    return named | {"key": key} if key else named
