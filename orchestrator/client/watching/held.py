"""Which limits and services hold the runs of a wait: none that only others wait for.

Reads for a wait that has no progress; changes nothing.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from stepfleet.orchestrator.protocol.outage import circuit_id
from stepfleet.orchestrator.protocol.waiting import waits_in
from stepfleet.orchestrator.records.calls.answers import Awaited
from stepfleet.orchestrator.store.admission.limits import Limits
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.records.codec import load_outage
from stepfleet.orchestrator.store.store import Store

SAMPLED = 100
"""Runs that are looked at: of those that are held, and evenly of a batch."""

Held = Callable[[], Awaitable[str]]
"""Reads what holds that which is waited for; an empty text where nothing does."""


def held_batch(store: Store, batch_id: str) -> Held:
    """Return what reads the limits and services that hold runs of a batch, and those below them."""
    limits, circuits = store.limits, store.circuits

    async def own(run_ids: Sequence[str]) -> set[str]:
        """Return those that are of the batch, or that it pays for."""
        heads = await store.connection.execute_all(
            *(("HMGET", store.keys.run(one), "batch", "billed") for one in run_ids)
        )
        return {one for one, head in zip(run_ids, heads, strict=True) if batch_id in head}

    async def read() -> str:
        outages = [
            str(one)
            for one in await circuits.outages()
            if one.waiting and await own(await circuits.some_of(circuit_id(one.service), SAMPLED))
        ]
        waiting = await limits.some_waiting(SAMPLED)
        waits = {one: waiting[one] for one in await own(list(waiting))}
        if not waits and waiting:  # among many others
            rows = (await store.batches.get(batch_id)).rows
            every = range(0, rows, max(-(-rows // SAMPLED), 1))
            waits = await limits.waiting_for([run_id_of(batch_id, row) for row in every])
        return "; ".join([*outages, *await _named(limits, waits)])

    return read


def held_runs(store: Store, run_ids: Callable[[], Sequence[str]]) -> Held:
    """Return what reads the limits and services that hold these runs.

    Of runs that wait for others, below them, anything may be that holds anybody.
    """
    limits, circuits = store.limits, store.circuits

    async def read() -> str:
        some = run_ids()[:SAMPLED]
        fields = ("outage", "waiting", "step")
        heads = await store.connection.execute_all(
            *(("HMGET", store.keys.run(one), *fields) for one in some)
        )
        waits_below = any(
            one.queue == Awaited.RUN
            for _, text, step in heads
            for one in waits_in(text or "", step or "")
        )
        known = [out for text, _, _ in heads if (out := load_outage(text))]
        out_for = {of for out in known for of in out.circuits}
        outages = [
            str(one)
            for one in (await circuits.outages() if out_for or waits_below else ())
            if one.waiting and (waits_below or circuit_id(one.service) in out_for)
        ]
        waits = await limits.waiting_for(some)
        if not waits and waits_below:
            return "; ".join([*outages, *map(str, await limits.lines(1))])
        return "; ".join([*outages, *await _named(limits, waits)])

    return read


async def _named(limits: Limits, waits: Mapping[str, str]) -> list[str]:
    """Return in words for which limit most runs wait; `waits` has its name by run."""
    most = [name for name, _ in Counter(waits.values()).most_common(1)]
    return [str(one) for one in await limits.states(most)]
