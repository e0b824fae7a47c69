"""Reads a run's steps page by page, as a timeline shows them: bounded, whatever they contain."""

import asyncio
from collections.abc import Sequence

import orjson
from pydantic import ValidationError

from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.records.outcome import ContinuationOutcome
from stepfleet.orchestrator.records.run.summary import (
    Evaluated,
    RunTimeline,
    StepSummary,
    ToolSummary,
)
from stepfleet.orchestrator.records.steps import LoggedStep, StepResult
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.records.compression import unpacked_within
from stepfleet.orchestrator.store.runs.listing import RunLists
from stepfleet.orchestrator.store.runs.reading import unknown_run

MOST_STEPS = 100
LARGEST_STEP = 262_144
PAGE_BYTES = 1_048_576
LONGEST = 2_000
"""Characters of each text."""
MOST_CALLS = 50


class Timelines:
    """Reads timelines of one store."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._lists = RunLists(connection, keys)

    async def read(self, run_id: str, first: int, limit: int, *, content: bool) -> RunTimeline:
        """Return up to `limit` steps from the step `first` (from 1) on; fewer of large ones.

        Raises `ConfigurationError` for an unknown run, `StoreError`.
        """
        found = await self._lists.summaries([run_id])
        if not found:
            raise unknown_run(run_id)
        (run,) = found
        key = self._keys.run(run_id)
        numbers = range(first, min(first + limit, run.steps + 1))
        sizes = await self._connection.execute_all(
            *(("HSTRLEN", f"{key}:log", number - 1) for number in numbers)
        )
        taken, size = 0, 0
        while taken < len(numbers) and (
            not taken or size + min(sizes[taken], LARGEST_STEP) <= PAGE_BYTES
        ):
            size += sizes[taken] if sizes[taken] <= LARGEST_STEP else 0
            taken += 1
        small = [n for n, one in zip(numbers[:taken], sizes, strict=False) if one <= LARGEST_STEP]
        stored = dict(
            zip(
                small,
                await self._connection.execute_all(
                    *(("HGET", f"{key}:log", number - 1) for number in small)
                ),
                strict=True,
            )
        )
        steps = await asyncio.to_thread(_steps, numbers[:taken], stored, content=content)
        following = first + len(steps)
        lost, known = await self._connection.execute_all(
            ("HLEN", f"{key}:lost"), ("HGET", key, "outcome")
        )
        reason, evaluations = _why(known)
        return RunTimeline(
            run=run,
            reason=reason,
            evaluations=evaluations,
            steps=tuple(steps),
            next=following if following <= run.steps and steps else None,
            lost_attempts=int(lost),
        )


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
    return _cut(outcome.reason), tuple(
        Evaluated(criterion=one.criterion, decision=one.decision, reason=_cut(one.reason))
        for one in each
    )


def _steps(
    numbers: Sequence[int], stored: dict[int, str | None], *, content: bool
) -> list[StepSummary]:
    """Return the steps, at most so many that they have a few pages of bytes when unpacked."""
    found: list[StepSummary] = []
    size = 0
    for number in numbers:
        text = stored.get(number)
        if number in stored and text is None:  # its memory policy has trimmed the log
            found.append(StepSummary(step=number))
            continue
        try:
            plain = unpacked_within(PAGE_BYTES, text or "")
            size += len(plain)
            if found and size > 4 * PAGE_BYTES:
                break
            result = LoggedStep.from_json(plain).result if plain else None
        except (SerializationError, ValidationError):  # of another version, or larger unpacked
            result = None
        shown = (
            _step(result, content=content) if result else StepSummary(step=number, too_large=True)
        )
        found.append(shown)
    return found


def _step(result: StepResult, *, content: bool) -> StepSummary:
    calls = result.tool_calls[:MOST_CALLS]
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
        cost_usd=result.cost_usd,
        cached=result.cached,
        errors=tuple(_cut(error.message) for error in result.errors[:MOST_CALLS]),
        text=_cut(result.thought) if content and result.thought else None,
        tool_calls=tuple(
            ToolSummary(
                tool=call.tool_name,
                call_id=_cut(call.call_id),
                is_error=call.is_error,
                duration_ms=call.duration_ms,
                error=_cut(call.error.message) if call.error else None,
                arguments=_cut(_json(call.arguments)) if content else None,
                result=_cut(_json(call.result)) if content else None,
            )
            for call in calls
        ),
    )


def _json(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value, default=str).decode()


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
