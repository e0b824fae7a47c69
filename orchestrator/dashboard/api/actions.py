"""What is changed: retry, cancel, pause and resume of runs and batches, and decisions of people."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

from tornado import web

from stepfleet.orchestrator.agents.config import named_overrides
from stepfleet.orchestrator.client.approvals import KINDS, AskFilter, asks_below
from stepfleet.orchestrator.client.audit import actor, noted_elsewhere
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.client.runs import RunConditions
from stepfleet.orchestrator.dashboard.access import AccessRole, exact_in_browsers
from stepfleet.orchestrator.dashboard.api.entries import (
    CONDITIONS_OF_CALLS,
    LONGEST_NAME,
    conditions,
    of_change,
    of_result,
)
from stepfleet.orchestrator.dashboard.api.handling import (
    FIX,
    ApiHandler,
    MissingError,
    Parameter,
    ReadHandler,
    body_of,
    text,
    whole,
    words,
)
from stepfleet.orchestrator.dashboard.api.records import (
    ActionResult,
    Change,
    SubmissionResult,
    WaitingCall,
    WaitingPage,
)
from stepfleet.orchestrator.errors import AgentException, ConfigurationError
from stepfleet.orchestrator.events.envelope import args_shown
from stepfleet.orchestrator.records.calls.answers import AskPage, Decided
from stepfleet.orchestrator.store.runs.control import ControlResult

log = logging.getLogger(__name__)

T = TypeVar("T", ActionResult, SubmissionResult)
VERBS = ("retry", "cancel", "pause", "resume")
AT_ONCE = 20
PAGE = 500
MOST_REFUSED = 20
_SELECTED = {"status", "stop_reason", "agent", "tenant", "error"}


class Audited(ApiHandler):
    """What changes something. It is in the audit stream before it begins, and with its outcome."""

    def prepare(self) -> None:
        """Refuse actions where Flower knows no users."""
        super().prepare()
        if not self.is_known:
            raise web.HTTPError(403, f"actions need a password: {FIX}")

    async def audited(
        self, verb: str, target: str, detail: str, act: Callable[[], Awaitable[T]]
    ) -> T:
        """Return what `act` returns, noted before and after."""
        audit = (await store_of(self.site.fleet)).audit
        about = (actor(self.site.fleet.settings, "flower", self.user), verb, target)
        log.info("%s: %s of %s", self.user, verb, target)
        await audit.note(*about, f"requested {detail}")
        try:
            with noted_elsewhere():
                result = await act()
        except AgentException as error:
            await audit.note(*about, f"refused: {type(error).__name__}")  # the text may quote
            raise
        await audit.note(*about, f"done: {of_result(result)}")
        return result


class ActionHandler(Audited, ABC):
    """An action on what there is."""

    noun = ""
    verbs: ClassVar[tuple[str, ...]] = VERBS

    async def post(self, target: str, verb: str) -> None:
        """Act, and answer with what was done."""
        try:
            given = body_of(bytes(self.body), self.request.headers.get("Content-Type", ""), Change)
        except ConfigurationError as error:
            return self.refuse(error, 400)
        about = (verb, self.subject(target, given), of_change(given))
        act = partial(self.act, target, verb, given)
        return await self.attempt(lambda: self.audited(*about, act))

    def subject(self, target: str, given: Change) -> str:
        """Return what is acted on, as the audit names it."""
        del given
        return f"{self.noun} {target}"

    @abstractmethod
    async def act(self, target: str, verb: str, given: Change) -> ActionResult:
        """Do it."""

    def of_run(self, verb: str, given: Change) -> Callable[[str], Awaitable[ControlResult]]:
        """Return the action on one run."""
        if given.overrides and verb != "retry":
            raise ConfigurationError("overrides: a retry takes them, a message and a fork")
        if verb == "retry":
            own = named_overrides(given.overrides)
            return lambda run_id: self.site.fleet.runs.retry(run_id, **own)
        return getattr(self.site.fleet.runs, verb)  # type: ignore[no-any-return]

    async def each(
        self, run_ids: Sequence[str], verb: str, given: Change, cursor: str | None = None
    ) -> ActionResult:
        """Act on these runs. `cursor` is where more of them are."""
        act, limited = self.of_run(verb, given), asyncio.Semaphore(AT_ONCE)
        refused: dict[str, str] = {}

        async def one(run_id: str) -> bool:
            async with limited:
                try:
                    result = await act(run_id)
                    is_done, why = result.is_done, str(result)
                except ConfigurationError as error:
                    is_done, why = False, error.message
                if not is_done and len(refused) < MOST_REFUSED:
                    refused[run_id] = why
                return is_done

        done = sum(await asyncio.gather(*map(one, run_ids)))
        left = len(run_ids) - done
        return ActionResult(action=verb, runs=done, left_alone=left, refused=refused, next=cursor)


class RunAction(ActionHandler):
    """An action on a run."""

    noun = "run"
    verbs: ClassVar = (*VERBS, "send", "fork")

    async def act(self, target: str, verb: str, given: Change) -> ActionResult:
        """Do it. Raises `ConfigurationError`."""
        if given.where or given.filter or given.cursor or given.runs is not None:
            raise ConfigurationError("where, filter, cursor and runs are for several runs")
        try:
            await self.site.fleet.runs.timeline(target, limit=1, content=False)
        except ConfigurationError as error:
            raise MissingError(error.message) from None
        if verb not in VERBS:
            return await self._going_on(target, verb, given)
        if given.message is not None or given.at is not None:
            raise ConfigurationError("message and at are for send and fork")
        return _of_run(verb, await self.of_run(verb, given)(target))

    async def _going_on(self, target: str, verb: str, given: Change) -> ActionResult:
        """Give the run a message, or begin another one with its steps."""
        fleet, own = self.site.fleet, named_overrides(given.overrides)
        if verb == "fork":
            new = await fleet.history.fork(target, at=given.at, message=given.message, **own)
            return ActionResult(action=verb, runs=1, outcome="created", detail=new)
        if not given.message or given.at is not None:
            raise ConfigurationError("message: write what the run is to continue with, and no `at`")
        return _of_run(verb, await fleet.runs.send(target, given.message, **own))


def _of_run(verb: str, result: ControlResult) -> ActionResult:
    return ActionResult(
        action=verb,
        runs=int(result.is_done),
        outcome=result.outcome.value,
        detail=result.detail or None,
        text=str(result),
    )


class BatchAction(ActionHandler):
    """An action on a batch, or on those of its runs that a filter selects."""

    noun = "batch"

    async def act(self, target: str, verb: str, given: Change) -> ActionResult:
        """Do it. Raises `ConfigurationError`."""
        try:
            batch = await self.site.fleet.batches.get(target)
        except ConfigurationError as error:
            raise MissingError(error.message) from None
        if given.runs is not None:
            raise ConfigurationError("runs: ids are for /runs; use filter")
        if given.filter is not None:
            return await self._selected(target, verb, given, given.filter)
        if verb == "retry":
            own = named_overrides(given.overrides)
            runs = await batch.retry(where=given.where or (), **own)
            return ActionResult(action=verb, runs=runs)
        if given.overrides or given.where:
            raise ConfigurationError("where and overrides: only a retry takes them; use filter")
        return ActionResult(action=verb, runs=await getattr(batch, verb)())

    async def _selected(
        self, batch: str, verb: str, given: Change, which: dict[str, Any]
    ) -> ActionResult:
        if given.where or not which.keys() <= _SELECTED:
            msg = f"filter: write {', '.join(sorted(_SELECTED))}, and no `where` with it"
            raise ConfigurationError(msg)
        page = await self.site.fleet.runs.page(
            batch=batch, limit=PAGE, cursor=given.cursor, **which
        )
        return await self.each([run.run_id for run in page.runs], verb, given, page.next)


class FleetAction(ActionHandler):
    """Pause or resume of the whole fleet."""

    noun = "fleet"
    verbs: ClassVar = ("pause", "resume")

    async def post(self, target: str, verb: str = "") -> None:
        """Act, and answer with what was done. The address names the verb alone."""
        await super().post(verb, target)

    async def act(self, target: str, verb: str, given: Change) -> ActionResult:
        """Do it."""
        del target
        if given != Change():
            raise ConfigurationError("body: leave it empty")
        await getattr(self.site.fleet, verb)()
        return ActionResult(action=verb, outcome=f"{verb}d")


class LimitAction(ActionHandler):
    """A limit is set (`overrides` are its fields, "" takes one away), or removed."""

    noun = "limit"
    verbs: ClassVar = ("set", "clear")

    async def act(self, target: str, verb: str, given: Change) -> ActionResult:
        """Do it. Raises `ConfigurationError`."""
        if given != Change(overrides=given.overrides) or (verb == "clear" and given.overrides):
            raise ConfigurationError("overrides: write the limit's fields, for set alone")
        if lacking := [name for name, value in given.overrides.items() if value is None]:
            fix = 'write a value, or "" to take it away; null is none'
            raise ConfigurationError(f"overrides: {lacking[0]}: {fix}")
        if verb == "set":
            fields = {name: None if one == "" else one for name, one in given.overrides.items()}
            limit = await self.site.fleet.limits.set(target, **fields)
            return ActionResult(action=verb, outcome="set", detail=limit.to_json())
        if not await self.site.fleet.limits.clear(target):
            raise ConfigurationError(f"there is no limit {target!r}")
        return ActionResult(action=verb, outcome="cleared")


class RunsAction(ActionHandler):
    """An action on runs that are named, or that a filter selects."""

    noun = "runs"

    async def post(self, target: str, verb: str = "") -> None:
        """Act, and answer with what was done."""
        await super().post("by id or filter", verb or target)

    async def act(self, target: str, verb: str, given: Change) -> ActionResult:
        """Do it. Raises `ConfigurationError`."""
        del target
        if given.where or (given.runs is None) == (given.filter is None):
            raise ConfigurationError("body: write either runs, a list of ids, or a filter")
        if given.runs is not None:
            return await self.each(list(dict.fromkeys(given.runs)), verb, given)
        which = cast("RunConditions", given.filter or {})
        if not which.keys() <= RunConditions.__annotations__.keys():
            msg = f"filter: write {', '.join(RunConditions.__annotations__)}"
            raise ConfigurationError(msg)
        page = await self.site.fleet.runs.page(limit=PAGE, cursor=given.cursor, **which)
        return await self.each([run.run_id for run in page.runs], verb, given, page.next)


MOST = 200
LONGEST_ARGUMENT = 2_000
"""Characters of an argument that are shown."""
_CONDITIONS: dict[str, Parameter] = {
    "agent": Parameter("the whole name of the agent"),
    "tool": Parameter("the whole name of the tool"),
    "batch": Parameter("the batch's id"),
    "tenant": Parameter("the whole name"),
    "group": Parameter("equal calls: same agent, tool and arguments"),
    "key": Parameter("exactly one call, as it was listed"),
    "kind": words(KINDS),
}


class Approvals(ReadHandler):
    """Calls that wait for a person, the oldest first."""

    parameters: ClassVar = {
        **_CONDITIONS,
        "run": Parameter("the run that waits, alone"),
        "below": Parameter("the run that waits for those that wait for people, alone"),
        "limit": whole("how many", 1, MOST),
        "cursor": text("the `next` of the page before", 400),
    }

    async def found(self, *_: str, **query: Any) -> WaitingPage:
        """Return a page."""
        fleet, run, below = self.site.fleet, query.pop("run", None), query.pop("below", None)
        approvals = fleet.approvals
        if below:
            page = AskPage(asks=await asks_below(await fleet.runs.tree(below), approvals))
        elif run:
            page = AskPage(asks=await approvals.of_run(run))
        else:
            page = await approvals.page(**{"limit": MOST, **query})
        shows = self.shows_content
        store = await store_of(fleet)
        return WaitingPage(
            waiting=tuple(
                WaitingCall(
                    ask=one.model_copy(update={"arguments": self._shown(one.arguments)})
                    if shows
                    else one.model_copy(update={"arguments": {}}),
                    group=one.group,
                    is_hidden=not shows,
                )
                for one in page.asks
            ),
            next=page.next,
            total=(await store.approvals.figures()).count,
        )

    def _shown(self, arguments: dict[str, Any]) -> dict[str, Any]:
        shown: dict[str, Any] = exact_in_browsers(args_shown(arguments, LONGEST_ARGUMENT))
        return shown


class Decide(ActionHandler):
    """Calls that wait are approved, denied or answered: those of `runs`, of a `filter`, or of both.

    `message` is the reason, or the answer; `at` the call's place where one run waits for several.
    """

    noun = "calls"
    needs: ClassVar = AccessRole.APPROVER
    verbs: ClassVar = ("approve", "deny", "answer")

    async def post(self, target: str, verb: str = "") -> None:
        """Act, and answer with what was done."""
        await super().post("that wait", verb or target)

    def subject(self, target: str, given: Change) -> str:
        """Return which calls are decided: the detail of an entry is cut, perhaps before them."""
        named = conditions(given.filter or {}, CONDITIONS_OF_CALLS)
        named |= {"run": given.runs[0][:LONGEST_NAME]} if given.runs else {}
        which = ", ".join(f"{name} {value}" for name, value in named.items())
        return f"{self.noun} {target}: {which}" if which else super().subject(target, given)

    async def act(self, target: str, verb: str, given: Change) -> ActionResult:
        """Do it. Raises `ConfigurationError`."""
        del target
        options, runs = self._options(verb, given), list(dict.fromkeys(given.runs or ()))
        if given.runs is None:
            decided = await self.site.fleet.decide(**options)
            return ActionResult(action=verb, runs=decided.applied, left_alone=decided.late)
        decided, refused = Decided(), dict[str, str]()
        for run_id in runs:
            try:
                decided = decided.plus(await self.site.fleet.decide(run_id, **options))
            except ConfigurationError as error:
                if len(runs) == 1:
                    raise
                refused[run_id] = error.message
        shown = dict(list(refused.items())[:MOST_REFUSED])
        left = decided.late + len(refused)
        return ActionResult(action=verb, runs=decided.applied, left_alone=left, refused=shown)

    def _options(self, verb: str, given: Change) -> dict[str, Any]:
        """Return the options of `decide`. Raises `ConfigurationError`."""
        if given.overrides or given.where or given.cursor:
            raise ConfigurationError("body: write runs or a filter, message, and at")
        if given.runs is None and not given.filter:
            raise ConfigurationError("body: name runs, or conditions in filter, or both")
        if given.filter is not None and not given.filter.keys() <= AskFilter.__annotations__.keys():
            raise ConfigurationError(f"filter: write {', '.join(AskFilter.__annotations__)}")
        options: dict[str, Any] = {"approve": verb != "deny", "by": self.user}
        if given.message:
            options["answer" if verb == "answer" else "reason"] = given.message
        if verb == "approve":
            options["kind"] = "approval"
        if given.at is not None:
            options["call"] = given.at
        return options | (given.filter or {})
