"""Calls that wait for people, as a client sees them: listed, decided, answered, or why not."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, TypedDict, Unpack

from stepfleet.orchestrator.client.audit import actor, changes
from stepfleet.orchestrator.client.session import FleetSession
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.protocol.waiting import Arrived
from stepfleet.orchestrator.records.base import well_formed
from stepfleet.orchestrator.records.calls.answers import (
    Answer,
    Ask,
    AskCount,
    AskPage,
    Awaited,
    Decided,
    Decision,
)
from stepfleet.orchestrator.records.run.summary import RunTree
from stepfleet.orchestrator.records.text.validation import meant
from stepfleet.orchestrator.store.codec import awaited_calls
from stepfleet.orchestrator.store.pace import in_groups
from stepfleet.orchestrator.store.runs.approvals import ApprovalStore, Waits
from stepfleet.orchestrator.store.runs.reading import StoredRun

LONGEST_TEXT = 16_000
"""Characters of an answer, and of a reason."""
_PAGE = 200
_TEXT = (str, type(None))
_DECISION: dict[str, tuple[type, ...]] = {
    "before": (datetime,),
    "call": (int, type(None)),
    "approve": (bool,),
    "reason": _TEXT,
    "answer": _TEXT,
    "by": _TEXT,
}


KINDS = ("approval", "question")
"""What a call waits for."""
_CALLS = 20
"""Calls that are named."""
_LONGEST = 300
"""Characters of a decision with its reason."""
_RUNS = 10
"""Runs that are looked at: a command for each."""


class AskFilter(TypedDict, total=False):
    """Which calls are meant; all conditions hold.

    `group` is that of equal calls, `key` that of one call, as it was listed.
    """

    agent: str
    tool: str
    batch: str
    tenant: str
    group: str
    key: str
    kind: str


class DecideOptions(AskFilter, total=False):
    """A decision, and which calls it is for.

    `call` is the call's place in its turn, from 0, where a run waits for several. `approve` is
    true by default, `reason` is what the model reads of a denial, `answer` the text for a question,
    `by` who decides: the user of this process by default. Of several runs, calls are decided that
    waited at the time `before` (UTC): now by default.
    """

    before: datetime
    call: int
    approve: bool
    reason: str
    answer: str
    by: str


def _verb_of(given: Mapping[str, Any]) -> str:
    options = given["options"]
    if not options.get("approve", True):
        return "deny"
    return "approve" if options.get("answer") is None else "answer"


def _calls_of(given: Mapping[str, Any], _: Any) -> str:
    named = {"run": given["run_id"], **given["options"]}
    which = (
        f"{name} {named[name]}"
        for name in ("run", "call", *AskFilter.__annotations__)
        if named.get(name) is not None
    )
    return f"calls that wait: {', '.join(which)}"


class AsyncFleetApprovals:
    """Calls that wait for a person: `fleet.approvals`. `fleet.decide` decides them."""

    def __init__(self, session: FleetSession) -> None:
        self._session = session

    async def page(
        self, *, limit: int = 50, cursor: str | None = None, **which: Unpack[AskFilter]
    ) -> AskPage:
        """Return up to `limit` calls that wait, the oldest first; all conditions hold.

        A page may be short, or empty, and have a `next`. Raises `ConfigurationError` that names the
        field.
        """
        _check(which)
        found, following = await (await self._approvals()).page(limit, cursor)
        asks = (one.ask for one in found)
        return AskPage(asks=tuple(a for a in asks if _matches(a, which)), next=following)

    async def of_run(self, run_id: str) -> tuple[Ask, ...]:
        """Return the calls of a run that wait; none for a run that is not there."""
        return tuple(one.ask for one in await (await self._approvals()).of_run(run_id))

    async def of_batch(self, batch_id: str) -> AskCount:
        """Return how many calls of a batch wait, those of the runs below its own among them.

        A count up to 1,000, among the 5,000 calls that wait longest or so.
        """
        return await (await self._approvals()).count_of_batch(batch_id)

    async def all(self, **which: Unpack[AskFilter]) -> AsyncGenerator[Ask, None]:
        """Yield all calls that wait, the oldest first."""
        cursor: str | None = None
        while True:
            page = await self.page(limit=_PAGE, cursor=cursor, **which)
            for ask in page.asks:
                yield ask
            if (cursor := page.next) is None:
                return

    @changes(_verb_of, _calls_of)
    async def decide(self, run_id: str | None = None, **options: Unpack[DecideOptions]) -> Decided:
        """Decide calls that wait: those of a run, or all that the conditions hold for.

        The first decision of a call counts; calls that begin to wait meanwhile are not decided.
        Raises `ConfigurationError` where nothing of the run waits, or the answer is none of the
        options of one of these questions: nothing is decided then.
        """
        which = AskFilter(**{k: v for k, v in options.items() if k not in _DECISION})  # type: ignore[typeddict-item]
        _check(which)
        _check_decision(options)
        if run_id is None and not which:
            raise ConfigurationError("name a run, or conditions such as batch= or tool=")
        if not isinstance(run_id, str | None):
            raise ConfigurationError(f"run_id is {run_id!r}; write the id of a run")
        store = await self._session.store()
        now = await store.runs.now()
        by = options.get("by") or actor(self._session.settings).user
        decision = _decision(options, by, now)
        asks = await self._approvals()
        if run_id is not None:
            run, waits = await store.runs.get(run_id), await asks.of_run(run_id)
            call = options.get("call")
            asked = (one for one in waits if _matches(one.ask, which))
            meant = [one for one in asked if call in (None, one.ask.index)]
            if not meant:
                all_that_wait = [one.ask for one in waits]
                made, kind = await asks.made(run_id), which.get("kind")
                raise ConfigurationError(why_undecided(run, all_that_wait, made, call, kind))
            if len(meant) > 1:
                places = ", ".join(f"{one.ask.index} ({one.ask.tool})" for one in meant)
                msg = f"run {run_id} waits for several; name the call: {places}"
                raise ConfigurationError(msg)
            _check_answer(meant[0].ask, decision)
            return await _decided(asks, meant, decision)
        before, decided = options.get("before", now), Decided()
        if decision.text is not None:
            async for page in _matching(asks, which, decision, before):
                for one in page:
                    _check_answer(one.ask, decision)
        async for page in _matching(asks, which, decision, before):
            decided = decided.plus(await _decided(asks, page, decision))
        return decided

    async def _approvals(self) -> ApprovalStore:
        return (await self._session.store()).approvals


async def _matching(
    asks: ApprovalStore, which: AskFilter, decision: Decision, before: datetime
) -> AsyncGenerator[list[Waits], None]:
    """Yield by pages what the conditions hold for, of the calls that waited at that time.

    What begins to wait meanwhile, perhaps for what was denied just now, nobody has seen.
    """
    cursor: str | None = None
    while True:
        page, cursor = await asks.page(_PAGE, cursor)
        seen = [one for one in page if one.ask.since <= before]
        yield [one for one in seen if _matches(one.ask, which) and _is_for(one.ask, decision)]
        if cursor is None or len(seen) < len(page):
            return


def _check_decision(options: DecideOptions) -> None:
    """Raise `ConfigurationError` that names the field of an invalid decision."""
    for name, kinds in _DECISION.items():
        value = options.get(name)
        is_flag = isinstance(value, bool) and bool not in kinds
        if name in options and (is_flag or not isinstance(value, kinds)):
            msg = f"{name} is {value!r:.100}; write a value of type {kinds[0].__name__}"
            raise ConfigurationError(msg)
    for name in ("reason", "answer", "by"):
        length = len(str(options.get(name) or ""))
        if length > LONGEST_TEXT:
            msg = f"{name} has {length:,} characters; write up to {LONGEST_TEXT:,}"
            raise ConfigurationError(msg)
    before = options.get("before")
    if before is not None and before.tzinfo is None:
        raise ConfigurationError("before has no time zone; write datetime(..., tzinfo=UTC)")
    if options.get("answer") is not None and not options.get("approve", True):
        msg = "answer= and approve=False exclude each other; deny a question with reason="
        raise ConfigurationError(msg)


def _decision(options: DecideOptions, by: str, at: datetime) -> Decision:
    answer = options.get("answer")
    return Decision(
        approved=options.get("approve", True),
        text=None if answer is None else well_formed(answer),
        reason=well_formed(options.get("reason") or ""),
        by=well_formed(by),
        at=at,
    )


async def _decided(asks: ApprovalStore, waits: Sequence[Waits], decision: Decision) -> Decided:
    replies = await in_groups(waits, lambda one: asks.decide(one, decision))
    applied = sum(reply.applied for reply in replies)
    before = next((who for reply in replies if (who := _earlier(reply))), None)
    return Decided(applied=applied, late=len(replies) - applied, first=before)


def _earlier(reply: Arrived) -> Decision | None:
    return Answer.from_json(reply.first).decision if reply.first else None


def _is_for(ask: Ask, decision: Decision) -> bool:
    """Return whether a decision about many calls can be one about this: questions have answers."""
    return not decision.approved or (ask.kind == "question") == (decision.text is not None)


def _check_answer(ask: Ask, decision: Decision) -> None:
    """Raise `ConfigurationError` unless that is an answer to the call."""
    if ask.kind != "question":
        if decision.text is not None:
            msg = f"tool {ask.tool!r} of run {ask.run_id} waits for an approval, not for an answer"
            raise ConfigurationError(msg)
        return
    if decision.approved and not decision.text:
        raise ConfigurationError(f"run {ask.run_id} asks a question; give an answer, or deny it")
    options = ask.arguments.get("options")
    given = [str(one) for one in options] if isinstance(options, list) else []
    if decision.text is not None and given and decision.text not in given:
        shown = ", ".join(given[:20])
        msg = f"the answer is none of the options of run {ask.run_id}: {shown[:500]}"
        raise ConfigurationError(msg)


def _check(which: Any) -> None:
    for name, value in which.items():
        if name not in AskFilter.__annotations__ or not isinstance(value, str):
            known = (*AskFilter.__annotations__, *_DECISION)
            close = "" if name in known else meant(name, known)
            fix = close or f"; write {', '.join(AskFilter.__annotations__)}"
            raise ConfigurationError(f"{name!r} is not a condition with text{fix}")
        if name == "kind" and value not in KINDS:
            raise ConfigurationError(f"kind is {value!r:.60}; write {' or '.join(KINDS)}")


def _matches(ask: Ask, which: AskFilter) -> bool:
    values = {
        "agent": ask.agent,
        "tool": ask.tool,
        "batch": ask.batch_id,
        "tenant": ask.tenant or "",
        "key": ask.key,
        "kind": ask.kind,
        **({"group": ask.group} if "group" in which else {}),
    }
    return all(values[name] == value for name, value in which.items())


def why_undecided(
    run: StoredRun,
    asks: Sequence[Ask],
    made: Mapping[int, Decision],
    call: int | None,
    kind: str | None,
) -> str:
    """Return why none of a run's calls is decided, with the command that fits.

    `asks` are its calls that wait, `made` the decisions in its open step by the calls' places,
    `call` and `kind` what was meant.
    """
    run_id = run.run_id
    if call is not None and call in made:
        return f"call {call} of run {run_id} was {_cut(made[call])}"
    if asks:
        return _others_wait(run_id, asks, call, kind)
    if run.state.status.is_terminal:
        return f"run {run_id} has ended ({run.state.status}){_newest(run)}"
    if made:
        done = "; ".join(f"call {at} was {_cut(one)}" for at, one in list(made.items())[:_CALLS])
        return f"run {run_id} waits for no other decision: {done}"
    return _waits_for_no_person(run)


def _waits_for_no_person(run: StoredRun) -> str:
    """Return what a run waits for that waits for no person."""
    explain = f"stepfleet explain {run.run_id}"
    if "after" in run.header and run.header["step"] == "0":
        return f"run {run.run_id} has not begun, it waits for other runs: {explain}"
    if any(one.queue == Awaited.RUN for one in awaited_calls(run.header)):
        return f"run {run.run_id} waits for its sub-agents' runs; what these wait for: {explain}"
    return f"run {run.run_id} waits for no decision ({run.state.status}){_newest(run)}"


def _others_wait(run_id: str, asks: Sequence[Ask], call: int | None, kind: str | None) -> str:
    """Return which calls wait: of another kind, or others than were meant."""
    deny = f"or stepfleet decide {run_id} --deny"
    is_other_kind = call is None and all(one.kind != kind for one in asks)
    if is_other_kind and kind == "approval":
        return f"run {run_id} asks a question: stepfleet decide {run_id} --answer TEXT, {deny}"
    if is_other_kind and kind == "question":
        tools = ", ".join(sorted({one.tool for one in asks})[:_CALLS])
        approve = f"stepfleet decide {run_id} --approve, {deny}"
        return f"run {run_id} asks no question, it waits for an approval of {tools}: {approve}"
    places = ", ".join(f"{one.index} ({one.kind}, {one.tool})" for one in asks[:_CALLS])
    return f"run {run_id} does not wait for that call, but for: {places}"


def _newest(run: StoredRun) -> str:
    """Return the newest decision in a run's log, if there is one."""
    calls = (call for step in reversed(run.log) for call in reversed(step.result.tool_calls))
    newest = next((call for call in calls if call.decision), None)
    if newest is None or newest.decision is None:
        return ""
    return f"; its call of {newest.tool_name} was {_cut(newest.decision)}"


def _cut(decision: Decision) -> str:
    return str(decision)[:_LONGEST]


async def asks_below(tree: RunTree, approvals: AsyncFleetApprovals) -> tuple[Ask, ...]:
    """Return the calls that wait for people in the runs below, of the first ten open ones.

    A run with open runs below it waits for these.
    """
    found: list[Ask] = []
    for one in islice(_last_open(tree), _RUNS):
        found += await approvals.of_run(one)
    return tuple(found)


def _last_open(tree: RunTree) -> Iterator[str]:
    """Yield the runs below that have not ended, and have no such run below themselves."""
    for one in tree.below:
        if one.run.status.is_terminal:
            continue
        below = list(_last_open(one))
        yield from below or [one.run.run_id]
