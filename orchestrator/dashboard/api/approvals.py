"""Calls that wait for people: read by pages, and decided with the name of Flower's user."""

from typing import Any, ClassVar

from stepfleet.orchestrator.client.approvals import KINDS, AskFilter, asks_below
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.dashboard.api.actions import MOST_REFUSED, ActionHandler
from stepfleet.orchestrator.dashboard.api.handling import Parameter, ReadHandler, text, whole, words
from stepfleet.orchestrator.dashboard.api.records import (
    Action,
    ActionResult,
    Waiting,
    WaitingPage,
)
from stepfleet.orchestrator.dashboard.visible import exact_in_browsers
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.events.envelope import args_shown
from stepfleet.orchestrator.records.calls.answers import AskPage, Decided

MOST = 200
LONGEST_ARGUMENT = 2_000
"""Characters of an argument that are shown."""
LONGEST_NAME = 80
"""Characters of a name in the audit."""
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
                Waiting(
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
    verbs: ClassVar = ("approve", "deny", "answer")

    async def post(self, target: str, verb: str = "") -> None:
        """Act, and answer with what was done."""
        await super().post("that wait", verb or target)

    def subject(self, target: str, given: Action) -> str:
        """Return which calls are decided: the detail of an entry is cut, perhaps before them."""
        named = {**(given.filter or {}), **({"run": given.runs[0]} if given.runs else {})}
        which = ", ".join(f"{name} {value[:LONGEST_NAME]}" for name, value in named.items())
        return f"{self.noun} {target}: {which}" if which else super().subject(target, given)

    async def act(self, target: str, verb: str, given: Action) -> ActionResult:
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

    def _options(self, verb: str, given: Action) -> dict[str, Any]:
        """Return the options of `decide`. Raises `ConfigurationError`."""
        if given.overrides or given.where or given.cursor:
            raise ConfigurationError("body: write runs or a filter, message, and at")
        if given.runs is None and given.filter is None:
            raise ConfigurationError("body: write runs, a list of ids, or a filter, or both")
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
