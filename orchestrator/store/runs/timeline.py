"""Reads a run's steps page by page, as a timeline shows them: bounded, whatever they contain."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import orjson
from pydantic import ConfigDict, ValidationError

from stepfleet.orchestrator.errors import ConfigurationError, SerializationError
from stepfleet.orchestrator.protocol.waiting import StepWait
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.answers import After, Awaited, Decision, awaited_by
from stepfleet.orchestrator.records.calls.tools import DENIED, ToolCallRecord
from stepfleet.orchestrator.records.outcome import ContinuationDecision, ContinuationOutcome
from stepfleet.orchestrator.records.run.facts import LostAttempt
from stepfleet.orchestrator.records.run.summary import (
    Evaluated,
    LostSummary,
    RunSummary,
    RunTimeline,
    StepSummary,
    ToolSummary,
)
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.records.steps import HandedOver, LoggedStep, StepResult
from stepfleet.orchestrator.store.codec import (
    MESSAGES,
    WAIT,
    load_lost,
    load_lost_use,
    load_wait,
    moment,
)
from stepfleet.orchestrator.store.compression import unpacked_within
from stepfleet.orchestrator.store.gateway import Gateway, Opened
from stepfleet.orchestrator.store.runs.listing import RunLists
from stepfleet.orchestrator.store.runs.reading import next_attempt, unknown_run

MOST_STEPS = 100
LARGEST_STEP = 262_144
PAGE_BYTES = 1_048_576
LONGEST = 2_000
"""Characters of each text."""
LARGEST_TEXT = 8 * 1_048_576
"""Bytes of a step, or of what a run was given, of which a text is read in full."""
MOST_CALLS = 50
MOST_NUMBERS = 10
MOST_LOST = 50
MOST_LOST_READ = 1_000
MOST_BEFORE = 20
"""Runs that are named of those that have to end before a run begins."""
_FOR = {
    Awaited.RUN: "the end of its sub-agent's run",
    Awaited.APPROVAL: "a person's approval",
    Awaited.PERSON: "a person's answer",
}


_OF_HEADER = ("outcome", "after", "vain", *WAIT)


class _Given(NamedTuple):
    text: str
    is_cut: bool


class _Handing(Record):
    """What a log entry says of the agents before and after its step."""

    model_config = ConfigDict(extra="ignore")

    handoff: HandedOver | None = None


_Read = tuple[StepSummary, LoggedStep | None]
"""A step, and its entry in the log where that can be read."""


class Timelines(Gateway):
    """Reads timelines of one store."""

    def __init__(self, opened: Opened, lists: RunLists) -> None:
        super().__init__(opened)
        self._lists = lists

    async def read(self, run_id: str, first: int, limit: int, *, content: bool) -> RunTimeline:
        """Return up to `limit` steps from the step `first` (from 1) on; fewer of large ones.

        Raises `ConfigurationError` for an unknown run, `StoreError`.
        """
        found = await self._lists.summaries([run_id])
        if not found:
            raise unknown_run(run_id)
        (run,) = found
        key = self._keys.run(run_id)
        numbers, stored = await self._log(key, range(first, min(first + limit, run.steps + 1)))
        steps = await asyncio.to_thread(_logged, numbers, stored, content=content)
        following = first + len(steps)
        named = _by_agents(steps, await self._agent_of(following, run) if steps else "")
        how_many, header = await self._reads.execute_all(
            ("HLEN", f"{key}:lost"),
            ("HMGET", key, *_OF_HEADER),
        )
        lost = await self._lost(key) if 0 < int(how_many) <= MOST_LOST_READ else ()
        known, after, vain, *waits = header
        wait = load_wait(dict(zip(WAIT, waits, strict=True)))
        now = await self._connection.now()
        again = next_attempt(wait, ((one.at, one.reason) for one in lost), now)
        before = {} if run.status.is_terminal or not after else await self._before(after)
        reason, evaluations = _why(known)
        done = [one.step - 1 for one in named]
        given = await self._given(key, [*done, run.steps]) if content else {}
        named = [
            _with_given(one, given[number]) if number in given else one
            for one, number in zip(named, done, strict=True)
        ]
        newest = given.get(run.steps)
        return RunTimeline(
            run=run,
            reason=reason,
            evaluations=evaluations,
            steps=tuple(named),
            next=following if following <= run.steps and steps else None,
            lost_attempts=int(how_many),
            lost_cost_usd=load_lost_use({"vain": vain or ""})[1].cost_usd,
            lost=lost,
            waits_for="" if run.status.is_terminal else _ends(before) or _waits(wait) or again,
            before=dict(list(before.items())[:MOST_BEFORE]),
            given=newest.text if newest else None,
            given_cut=bool(newest and newest.is_cut),
            content=content,
        )

    async def text(self, run_id: str, step: int, part: str) -> str:
        """Return a text of a step in full: `part` is its name in `StepSummary.cut`.

        Raises `ConfigurationError` where there is none, or it is in more than `LARGEST_TEXT` bytes;
        `StoreError`.
        """
        key = f"{self._keys.run(run_id)}:log"
        name = f"input:{step - 1}" if part == "given" else step - 1
        size = await self._reads.execute("HSTRLEN", key, name)
        if size > LARGEST_TEXT:
            msg = f"part: it is in {size:,} bytes, more than {LARGEST_TEXT:,}; use stepfleet show"
            raise ConfigurationError(msg)
        stored = await self._reads.execute("HGET", key, name) or ""
        text = await asyncio.to_thread(_text, stored, part) if stored else None
        if text is None:
            msg = f"part: step {step} of run {run_id} has no such text, or it cannot be read here"
            raise ConfigurationError(msg)
        return text

    async def _log(self, key: str, numbers: range) -> tuple[range, dict[int, str | None]]:
        """Return those of the steps that are read together, and the entries of the small ones."""
        sizes = await self._reads.execute_all(
            *(("HSTRLEN", f"{key}:log", number - 1) for number in numbers)
        )
        taken, size = 0, 0
        while taken < len(numbers) and (
            not taken or size + min(sizes[taken], LARGEST_STEP) <= PAGE_BYTES
        ):
            size += sizes[taken] if sizes[taken] <= LARGEST_STEP else 0
            taken += 1
        numbers = numbers[:taken]
        small = [n for n, one in zip(numbers, sizes, strict=False) if one <= LARGEST_STEP]
        found = await self._reads.execute_all(
            *(("HGET", f"{key}:log", number - 1) for number in small)
        )
        return numbers, dict(zip(small, found, strict=True))

    async def _agent_of(self, step: int, run: RunSummary) -> str:
        """Return the agent of a step, by the next hand-off; empty where that cannot be read."""
        key, rest = self._keys.run(run.run_id), range(step, run.steps + 1)
        numbers, stored = await self._log(key, rest[:MOST_STEPS])
        last = run.agent if len(numbers) == len(rest) else ""
        return await asyncio.to_thread(_next_agent, [stored.get(n) for n in numbers], last)

    async def _before(self, stored: str) -> dict[str, str]:
        """Return the runs that have to end before a run begins, with their statuses."""
        runs = After.from_json(stored).ids
        found = await self._reads.execute_all(
            *(("HGET", self._keys.run(one), "status") for one in runs)
        )
        return {
            one: status or "unknown"
            for one, status in zip(runs, found, strict=True)
            if not (status and Lifecycle(status).is_terminal)
        }

    async def _lost(self, key: str) -> tuple[LostSummary, ...]:
        found = await self._reads.execute("HGETALL", f"{key}:lost")
        try:
            return tuple(map(_lost, load_lost(found)[-MOST_LOST:]))
        except ValidationError:  # of another version
            return ()

    async def _given(self, key: str, numbers: Sequence[int]) -> dict[int, _Given]:
        """Return what the run was given after that many steps, if anything."""
        names = [f"input:{number}" for number in numbers]
        sizes = await self._reads.execute_all(*(("HSTRLEN", f"{key}:log", name) for name in names))
        found: dict[int, _Given] = {}
        for number, name, size in zip(numbers, names, sizes, strict=True):
            if size > LARGEST_STEP:
                found[number] = _Given(f"({size:,} bytes, too large for this page)", is_cut=True)
            elif size:
                stored = await self._reads.execute("HGET", f"{key}:log", name)
                text = _messages(stored or "[]")
                found[number] = _Given(_cut(text), len(text) > LONGEST)
        return found


def _with_given(step: StepSummary, given: _Given) -> StepSummary:
    cut = ("given", *step.cut) if given.is_cut else step.cut
    return step.model_copy(update={"given": given.text, "cut": cut})


def _messages(stored: str) -> str:
    try:
        given = MESSAGES.validate_json(stored)
    except ValidationError:  # of another version
        return "(it cannot be read)"
    return "\n".join(one.text if one.role == "user" else f"{one.role}: {one.text}" for one in given)


def _lost(one: LostAttempt) -> LostSummary:
    return LostSummary(
        step=one.step,
        kind=one.kind,
        at=moment(str(one.at_ms)) if one.at_ms else None,
        seconds=one.seconds,
        tokens=one.tokens,
        cost_usd=one.cost_usd,
        reason=_cut(one.reason) if one.reason else None,
    )


def _ends(before: dict[str, str]) -> str:
    many = len(before)
    return f"the ends of {many:,} runs" if many > 1 else "the end of a run" if many else ""


def _next_agent(stored: Sequence[str | None], last: str) -> str:
    """Return the agent of the first of these steps; `last` where none of them hands the run over.

    Empty where that is not known: a step that cannot be read may have done so.
    """
    size = 0
    for text in stored:
        try:
            plain = unpacked_within(PAGE_BYTES, text or "")
            made = _Handing.from_json(plain).handoff
        except (SerializationError, ValidationError):  # of another version, or too large
            return ""
        size += len(plain)
        if made or size > 4 * PAGE_BYTES:
            return made.by.name if made else ""
    return last


def _by_agents(steps: Sequence[_Read], agent: str) -> list[StepSummary]:
    """Return the steps with their agents, as far as these are known; `agent` has the next one."""
    found: list[StepSummary] = []
    for step, logged in reversed(steps):
        made = logged.handoff if logged else None
        agent = made.by.name if made else agent if logged else ""
        found.append(step.model_copy(update={"agent": agent or None}) if logged else step)
    return found[::-1]


def _waits(wait: StepWait | None) -> str:
    """Return what the next step waits for: tools on other queues, or a service that is out."""
    tools = (
        f"tool {one.tool!r}: {_FOR[by]}"
        if (by := awaited_by(one.queue))
        else f"tool {one.tool!r} on queue {one.queue!r}"
        for one in (wait.calls if wait else ())
    )
    if text := _cut(", ".join(tools)):
        return text
    out = wait and wait.outage
    return f"its model's service, out since {out.since:%Y-%m-%d %H:%M:%S} UTC" if out else ""


def _why(stored: str | None) -> tuple[str, tuple[Evaluated, ...]]:
    """Return the reason of the last decision, and what each criterion decided."""
    try:
        plain = unpacked_within(PAGE_BYTES, stored or "")
        outcome = ContinuationOutcome.from_json(plain) if plain else None
    except (SerializationError, ValidationError):
        return "", ()
    if outcome is None:
        return "", ()
    each = outcome.evaluations[:MOST_CALLS]
    same = [one for one in each if one.decision is outcome.decision]
    forbids = outcome.decision is ContinuationDecision.FORBID_CONTINUATION
    deciding = same[:1] if forbids else same
    return _cut(outcome.reason), tuple(
        Evaluated(
            criterion=one.criterion,
            decision=one.decision,
            reason=_cut(one.reason),
            numbers={
                name[:60]: str(value)[:60]
                for name, value in list(one.context.items())[:MOST_NUMBERS]
                if isinstance(value, int | float)
            },
            decisive=any(one is other for other in deciding),
        )
        for one in each
    )


def _logged(numbers: Sequence[int], stored: dict[int, str | None], *, content: bool) -> list[_Read]:
    """Return the steps, at most a few pages of unpacked bytes."""
    found: list[_Read] = []
    size = 0
    for number in numbers:
        text = stored.get(number)
        if number in stored and text is None:  # its memory policy has trimmed the log
            found.append((StepSummary(step=number), None))
            continue
        try:
            plain = unpacked_within(PAGE_BYTES, text or "")
            size += len(plain)
            if found and size > 4 * PAGE_BYTES:
                break
            logged = LoggedStep.from_json(plain) if plain else None
        except (SerializationError, ValidationError):  # of another version, or larger unpacked
            logged = None
        too_large = StepSummary(step=number, too_large=True, cut=("step",) if content else ())
        found.append(
            (_step(logged.priced_result, content=content) if logged else too_large, logged)
        )
    return found


def _step(result: StepResult, *, content: bool) -> StepSummary:
    calls = result.tool_calls[:MOST_CALLS]
    texts = _texts(result)
    return StepSummary(
        step=result.step,
        type=result.type.value,
        started_at=result.started_at,
        duration_ms=result.duration_ms,
        waited_seconds=result.waited_seconds,
        waited_for=result.waited_for,
        model=result.model,
        worker=result.worker,
        finish_reason=result.finish_reason.value,
        tokens=result.usage.total_tokens if result.usage else 0,
        output_tokens=result.usage.completion_tokens if result.usage else 0,
        cached_tokens=result.usage.cached_tokens if result.usage else 0,
        cost_usd=result.cost_usd,
        price_estimated=result.price_estimated,
        usage_estimated=result.usage_estimated,
        cached=result.cached,
        errors=tuple(_cut(error.message) for error in result.problems[:MOST_CALLS]),
        text=_cut(texts["text"]) if content and "text" in texts else None,
        tool_calls=tuple(
            ToolSummary(
                tool=call.tool_name,
                call_id=_cut(call.call_id),
                is_error=call.is_error,
                duration_ms=call.duration_ms,
                error=_error(call, content=content),
                arguments=_cut(texts[f"arguments:{at}"]) if content else None,
                result=_cut(texts[f"result:{at}"]) if content else None,
                run_id=call.run.run_id if call.run else None,
                decision=_decision(call.decision, content=content),
            )
            for at, call in enumerate(calls)
        ),
        cut=tuple(name for name, text in texts.items() if len(text) > LONGEST) if content else (),
    )


def _error(call: ToolCallRecord, *, content: bool) -> str | None:
    """Return why a call failed; that of a denied one has the reason, which is a person's text."""
    if call.error is None:
        return None
    is_hidden = call.error.code == DENIED and not content
    return "denied" if is_hidden else _cut(call.error.message)


def _decision(decision: Decision | None, *, content: bool) -> str | None:
    if decision is None:
        return None
    return _cut(str(decision if content else decision.model_copy(update={"reason": ""})))


def _texts(result: StepResult) -> dict[str, str]:
    """Return the texts of a step in full, by their names in `StepSummary.cut`."""
    found = {"text": result.thought} if result.thought else {}
    for at, error in enumerate(result.problems[:MOST_CALLS]):
        found[f"errors:{at}"] = error.message
    for at, call in enumerate(result.tool_calls[:MOST_CALLS]):
        found |= {f"arguments:{at}": _json(call.arguments), f"result:{at}": _json(call.result)}
        if call.error:
            found[f"error:{at}"] = call.error.message
    return found


def _text(stored: str, part: str) -> str | None:
    if part == "given":
        return _messages(stored)
    try:
        plain = unpacked_within(LARGEST_TEXT, stored)
        if part == "step":
            return exact_json.text(
                exact_json.loads(plain, constants=True), option=orjson.OPT_INDENT_2
            )
        return _texts(LoggedStep.from_json(plain).result).get(part)
    except (SerializationError, ValidationError):  # of another version, or larger unpacked
        return None


def _json(value: object) -> str:
    return value if isinstance(value, str) else exact_json.text(value, default=str)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
