"""Requests to a batch as a client makes them that dies, or stalls, before it has swept anything."""

from support.runs.stored_runs import Bench

from stepfleet.orchestrator.client.fleet import AsyncBatch
from stepfleet.orchestrator.records.batch import Manifest
from stepfleet.orchestrator.store.batches.batches import Batches
from stepfleet.orchestrator.store.batches.requests import BatchRequests, Request


def requests_of(desk: Bench) -> BatchRequests:
    """Return what a client makes its requests with."""
    opened = desk.opened
    batches = Batches(opened.connection, opened.keys, retention=3600)
    return BatchRequests(opened.connection, opened.keys, opened.dispatch, batches, grace=5)


async def manifest_of(desk: Bench, batch: AsyncBatch) -> Manifest:
    """Return the batch's manifest."""
    opened = desk.opened
    return await Batches(opened.connection, opened.keys, retention=60).get(batch.id)


async def in_force(desk: Bench, batch: AsyncBatch, word: str, request: str = "") -> Request:
    """Ask something of the whole batch, and sweep nothing. `request` is the token."""
    manifest = await manifest_of(desk, batch)
    fields = desk.control.batch_cancel("enough") if word == "cancel" else ""
    return await requests_of(desk).ask(manifest, word, request or f"{word} once", fields)
