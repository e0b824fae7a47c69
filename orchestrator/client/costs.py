"""What model calls have cost: sums from the ledger, single calls from the records of runs."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from datetime import date, timedelta
from typing import TypedDict

from stepfleet.orchestrator.errors import ConfigurationError, NotFoundError
from stepfleet.orchestrator.records.ledger import (
    COST_KEYS,
    LANES,
    CallState,
    CallSums,
    CostKey,
    CostLine,
    Costs,
    LedgerRow,
    Summing,
    bare_name,
    exact_usd,
    lane_of,
)
from stepfleet.orchestrator.records.run.facts import OriginKind
from stepfleet.orchestrator.records.run.results import LostAttempt
from stepfleet.orchestrator.records.usage import UsageStats, nano_usd
from stepfleet.orchestrator.store.batches.batches import pages_of
from stepfleet.orchestrator.store.codec import moment
from stepfleet.orchestrator.store.ledger import calls_of, day_of
from stepfleet.orchestrator.store.runs.reading import StoredRun
from stepfleet.orchestrator.store.store import Store

RUNS_AT_ONCE = 20
_COPIES = (OriginKind.FORK, OriginKind.CHECKPOINT)


class CostOptions(TypedDict, total=False):
    """Which calls `costs` counts: of whole days (UTC), of one tenant, batch, agent, model.

    `lane` is the provider's tier: standard, flex, priority, batch, ... `status` is committed, lost,
    ambiguous or cached.
    """

    since: date | None
    until: date | None
    tenant: str | None
    batch: str | None
    agent: str | None
    model: str | None
    lane: str | None
    status: str | None


def check_calls(which: CostOptions) -> CostOptions:
    """Return the conditions. Raises `ConfigurationError` for no status and no lane."""
    if unknown := which.keys() - CostOptions.__annotations__.keys():
        raise TypeError(f"there is no condition {min(unknown)!r}")
    for name, known in (("status", CallState), ("lane", LANES)):
        if which.get(name) not in (None, *known):
            given = ascii(which.get(name))[:60]
            raise ConfigurationError(f"{name}: there is no {given}; use {', '.join(known)}")
    return which


def means(which: CostOptions, call: LedgerRow | CostLine) -> bool:
    """Return whether a call is meant, apart from its time; models without their provider."""
    model = which.get("model")
    pairs = (
        (which.get("tenant"), call.tenant),
        (which.get("batch"), call.batch if isinstance(call, LedgerRow) else call.batch_id),
        (which.get("agent"), call.agent),
        (None if model is None else bare_name(model), call.model),
        (which.get("lane"), call.lane),
        (which.get("status"), call.state),
    )
    return all(wanted is None or wanted == (found or "") for wanted, found in pairs)


def cost_keys(by: str | Sequence[str]) -> tuple[CostKey, ...]:
    """Return the keys that costs are grouped by. Raises `ConfigurationError` for others."""
    names = [one.strip() for one in by.split(",")] if isinstance(by, str) else list(by)
    for name in names:
        if name and name not in COST_KEYS:
            msg = f"by: there is no {ascii(name)[:60]}; use {', '.join(COST_KEYS)}"
            raise ConfigurationError(msg)
    return tuple(one for one in COST_KEYS if one in names)


async def costs_of(store: Store, by: str | Sequence[str], which: CostOptions) -> Costs:
    """Return the sums of the calls that are meant. Raises `ConfigurationError`."""
    keys = cost_keys(by)
    since, until = await _days(store, which)
    sums = Summing(keys)
    async for row in store.ledger.rows(since, until):
        if means(which, row):
            sums.add(row)
    return sums.costs(since, until)


async def lines_of_runs(
    store: Store, run_id: str | None, which: CostOptions
) -> AsyncGenerator[CostLine, None]:
    """Yield the calls of one run, of a batch, or of all runs. Raises `ConfigurationError`."""
    since, until = await _days(store, which)
    if run_id is not None:
        pages = _each([[run_id]])
    elif (batch := which.get("batch")) is not None:
        rows = (await store.batches.get(batch)).rows
        pages = _each(pages_of(batch, rows, RUNS_AT_ONCE))
    else:
        pages = _of_all(store)
    async for page in pages:
        reads = (store.runs.get(one) for one in page)
        for run in await asyncio.gather(*reads, return_exceptions=run_id is None):
            if isinstance(run, NotFoundError):
                continue  # it has expired, or was not created yet
            if isinstance(run, BaseException):
                raise run
            for line in calls_of_run(run):
                in_time = line.time is None or since <= day_of(line.time) <= until
                if in_time and means(which, line):
                    yield line


def calls_of_run(run: StoredRun) -> Iterator[CostLine]:
    """Yield a run's model calls, step by step. Pure.

    Those of steps that a fork or a restored copy has taken over are not its own.
    """
    result = run.result()
    first = result.origin.at if result.origin and result.origin.kind in _COPIES else 0
    base = CostLine(
        run_id=run.run_id,
        step=0,
        batch_id=result.batch_id,
        tenant=result.tenant,
        agent=run.agent,
        model=bare_name(run.config.model),
        state=CallState.COMMITTED,
    )
    agents = {step.step: step.agent or run.agent for step in result.steps}
    lost: dict[int, list[LostAttempt]] = {}
    for one in sorted(run.lost, key=lambda one: one.at_ms):
        lost.setdefault(one.step, []).append(one)
    for logged in run.log:
        step = logged.result.step
        before = lost.pop(step, [])
        base = base.model_copy(update={"agent": agents[step]})
        yield from _lost_calls(base, before)
        for state, called, lane, sums in calls_of(logged) if step > first else ():
            model = base.model if called in ("", run.config.model) else called
            guessed = state is CallState.COMMITTED and model in logged.default_priced
            yield _line(base, sums).model_copy(
                update={
                    "step": step,
                    "attempt": len(before) + 1,
                    "model": model,
                    "lane": lane,
                    "price_estimated": guessed,
                    "request_id": logged.result.request_id or None,
                    "state": state,
                    "time": logged.committed_at or logged.result.started_at,
                }
            )
    for attempts in lost.values():
        yield from _lost_calls(base.model_copy(update={"agent": run.agent}), attempts)


def _lost_calls(base: CostLine, attempts: list[LostAttempt]) -> Iterator[CostLine]:
    """Yield those of attempts at one step that were or may have been paid."""
    for number, one in enumerate(attempts, 1):
        if not one.may_be_paid:
            continue
        is_sure = one.tokens > 0 and not one.estimated and one.cost_usd is not None
        usage = one.usage or UsageStats(prompt_tokens=one.tokens)
        sums = CallSums.of(usage, 1, nano_usd(one.cost_usd or 0.0))
        yield _line(base, sums).model_copy(
            update={
                "step": one.step,
                "attempt": number,
                "model": one.model or base.model,
                "lane": lane_of(one.service_tier),
                "price_estimated": one.default_priced,
                "state": CallState.LOST if is_sure else CallState.AMBIGUOUS,
                "usd": exact_usd(sums.cost) if one.tokens else None,
                "estimated": not is_sure,
                "time": moment(one.at_ms) if one.at_ms else None,
            }
        )


def _line(base: CostLine, sums: CallSums) -> CostLine:
    tokens = {name: getattr(sums, name) for name in CostLine.model_fields if "_tokens" in name}
    amounts = {"usd": exact_usd(sums.cost), "saved_usd": exact_usd(sums.saved)}
    return base.model_copy(update={**tokens, **amounts, "estimated": sums.estimated > 0})


async def _days(store: Store, which: CostOptions) -> tuple[date, date]:
    """Return the first and the last day. Raises `ConfigurationError`."""
    today = await store.ledger.today()
    oldest = today - timedelta(days=store.settings.ledger_days)
    since, until = day_of(which.get("since") or oldest), day_of(which.get("until") or today)
    if since > until:
        raise ConfigurationError(f"since: {since} is after {until}, the last day given")
    return max(since, oldest), min(until, today)


async def _each(pages: Iterable[list[str]]) -> AsyncIterator[list[str]]:
    for page in pages:
        yield page


async def _of_all(store: Store) -> AsyncIterator[list[str]]:
    """Yield all runs, those of Redis first: what is archived meanwhile is seen there."""
    seen: set[int] = set()
    async for found in _named(store):
        new = [one for one in found if ":" not in one and hash(one) not in seen]
        seen.update(map(hash, new))
        for first in range(0, len(new), RUNS_AT_ONCE):
            yield new[first : first + RUNS_AT_ONCE]


async def _named(store: Store) -> AsyncIterator[list[str]]:
    async for page in store.purging.pages(None):
        yield [key.partition("run:")[2] for key in page]
    archived = store.reads.archived
    async for file in archived.files():
        if file.is_whole:
            async for found in archived.runs(file):
                yield found
