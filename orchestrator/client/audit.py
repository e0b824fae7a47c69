"""Who changed what: each method of a client that changes something leaves one entry, when it ends.

The submission of a single run leaves none: it is the hot path of clients. What was refused before
anything was changed leaves none either. An entry that cannot be written is logged, and fails
nothing.
"""

import asyncio
import functools
import getpass
import inspect
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from redis.exceptions import RedisError

from stepfleet.orchestrator.errors import AgentException, ConfigurationError
from stepfleet.orchestrator.limits.limit import Limit
from stepfleet.orchestrator.records.audit import Actor, AuditEntry
from stepfleet.orchestrator.records.calls.answers import Decided
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.audit import MOST_ENTRIES
from stepfleet.orchestrator.store.runs.control import ControlResult
from stepfleet.orchestrator.store.store import Store

log = logging.getLogger(__name__)

LONGEST_NOTE = 2.0
"""Seconds that an entry may take to write: the action is done, and its caller waits."""
LONGEST_USER = 100
PAGE = 500
"""Entries that are read at once."""
FOLLOW_SECONDS = 1.0
"""Between two looks for new entries; each is one read of at most `PAGE`, while somebody follows."""
CLIENT = "client"
_source: ContextVar[str] = ContextVar("source", default=CLIENT)
_acts_for: ContextVar[str | None] = ContextVar("acts_for", default=None)
_is_noted: ContextVar[bool] = ContextVar("is_noted", default=False)


class _Session(Protocol):
    settings: Settings

    @property
    def opened(self) -> Store | None: ...


class _OfSession(Protocol):
    @property
    def _session(self) -> _Session: ...


C = TypeVar("C", bound=_OfSession)
P = ParamSpec("P")
T = TypeVar("T")
Target = str | Callable[[Mapping[str, Any], Any], str]
"""What is changed: a format of the call's arguments, or a function of them and of the result.

Without one there is no entry.
"""


def set_source(source: str) -> None:
    """Name what acts from here on in this context: a command, as `stepfleet cancel`."""
    _source.set(source)


@contextmanager
def acting_for(user: str) -> Iterator[None]:
    """Name whom the actions of this context are for. Raises `ConfigurationError`."""
    before = _acts_for.set(checked_user(user))
    try:
        yield
    finally:
        _acts_for.reset(before)


def checked_user(user: Any) -> str:
    """Return a user's name. Raises `ConfigurationError`."""
    if isinstance(user, str) and 1 <= len(user) <= LONGEST_USER:
        return user
    raise ConfigurationError(f"user is {ascii(user)[:70]}; write 1 to {LONGEST_USER} characters")


@contextmanager
def noted_elsewhere() -> Iterator[None]:
    """Let no action within leave an entry: the caller writes its own."""
    before = _is_noted.set(True)
    try:
        yield
    finally:
        _is_noted.reset(before)


def actor(settings: Settings, source: str | None = None, user: str | None = None) -> Actor:
    """Return who acts in this context."""
    name = user or _acts_for.get() or settings.user or _system_user()
    return Actor(name, socket.gethostname(), source or _source.get())


def _system_user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no such user in this container
        return "unknown"


def changes(
    action: str | Callable[[Mapping[str, Any]], str],
    target: Target,
    outcome: "Callable[[Any], str] | None" = None,
) -> Callable[
    [Callable[Concatenate[C, P], Coroutine[Any, Any, T]]],
    Callable[Concatenate[C, P], Coroutine[Any, Any, T]],
]:
    """Let a client's method leave an entry: `action` and `target` are made of its arguments.

    The entry comes after the action, with its `outcome` (as `outcome_of`).
    """

    def decorated(
        method: Callable[Concatenate[C, P], Coroutine[Any, Any, T]],
    ) -> Callable[Concatenate[C, P], Coroutine[Any, Any, T]]:
        signature = inspect.signature(method)

        @functools.wraps(method)
        async def call(self: C, /, *args: P.args, **options: P.kwargs) -> T:
            if _is_noted.get():
                return await method(self, *args, **options)
            bound = signature.bind(self, *args, **options)  # raises as the call would
            bound.apply_defaults()
            given: dict[str, Any] = bound.arguments

            async def note(detail: str, result: Any = None) -> None:
                done = action if isinstance(action, str) else action(given)
                what = target.format(**given) if isinstance(target, str) else target(given, result)
                if not what:
                    return
                user = given.get("options", {}).get("by")
                await _note(self._session, user, done, what, detail)

            try:
                result = await method(self, *args, **options)
            except ConfigurationError:
                raise  # nothing was changed
            except BaseException as error:  # a part of it may be done
                await note(f"failed: {type(error).__name__}")
                raise
            await note((outcome or outcome_of)(result), result)
            return result

        call.__dict__["changes"] = True
        return call

    return decorated


async def _note(session: _Session, user: str | None, action: str, target: str, detail: str) -> None:
    """Write an entry. What fails is logged: the action itself is done."""
    if (store := session.opened) is None:
        return  # nothing was changed
    who = actor(session.settings, user=user)
    try:
        async with asyncio.timeout(LONGEST_NOTE):
            await store.audit.note(who, action, target, detail)
    except (AgentException, RedisError, OSError) as error:
        about = (who.user, action, target, detail, error)
        log.warning("the audit has no entry of this action: %s: %s %s: %s (%s)", *about)


def outcome_of(result: Any) -> str:
    """Return how an action ended, in counts and ids: never texts of inputs, answers or reasons."""
    match result:
        case ControlResult():
            said = result.outcome.value
        case Decided():
            said = f"{result.applied:,} decided, {result.late:,} had been before"
        case Limit():
            said = result.to_json()
        case int() if not isinstance(result, bool):
            said = f"{result:,}"
        case str():
            said = result
        case _:
            return "done"
    return f"done: {said}"


@dataclass(frozen=True, slots=True)
class Which:
    """Entries that are wanted: up to `limit`, all conditions hold. Raises `ConfigurationError`."""

    limit: int
    since: datetime | None = None
    user: str | None = None
    action: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= MOST_ENTRIES:
            raise ConfigurationError(f"limit is {self.limit}; write 1 to {MOST_ENTRIES:,}")

    def is_new(self, entry: AuditEntry) -> bool:
        """Return whether the entry is of the time that is wanted."""
        return self.since is None or datetime.fromisoformat(entry.at) >= self.since

    def selects(self, entry: AuditEntry) -> bool:
        """Return whether the entry is wanted, but for its time."""
        return self.user in (None, entry.user) and self.action in (None, entry.action)


async def entries_of(
    store: Store, which: Which, *, follow: bool
) -> AsyncGenerator[AuditEntry, None]:
    """Yield the newest entries, the oldest of them first; with `follow` those that come, too."""
    found: list[AuditEntry] = []
    before, last = "+", "0"
    while page := await store.audit.newest(PAGE, before):
        before, last = page[-1][0], page[0][0] if before == "+" else last
        wanted = [entry for _, entry in page if which.is_new(entry)]
        found += filter(which.selects, wanted)
        if len(wanted) < len(page) or len(found) >= which.limit:
            break
    for entry in reversed(found[: which.limit]):
        yield entry
    while follow:
        for place, entry in (page := await store.audit.after(last, PAGE)):
            last = place
            if which.selects(entry):
                yield entry
        if len(page) < PAGE:
            await asyncio.sleep(FOLLOW_SECONDS)
