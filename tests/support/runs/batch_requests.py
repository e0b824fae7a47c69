"""Requests to a batch as a client makes them that dies, or stalls, before it has swept anything."""

from support.runs.stored_runs import Bench, with_settings

from stepfleet.orchestrator.client.fleet import AsyncBatch
from stepfleet.orchestrator.records.batch import Manifest
from stepfleet.orchestrator.store.batches.requests import BatchRequest, BatchRequests


def requests_of(desk: Bench) -> BatchRequests:
    """Return what a client makes its requests with."""
    return with_settings(desk.opened, retention=3600, grace=5).requests


async def manifest_of(desk: Bench, batch: AsyncBatch) -> Manifest:
    """Return the batch's manifest."""
    opened = desk.opened
    return await with_settings(opened, retention=60).batches.get(batch.id)


async def in_force(desk: Bench, batch: AsyncBatch, word: str, request: str = "") -> BatchRequest:
    """Ask something of the whole batch, and sweep nothing. `request` is the token."""
    manifest = await manifest_of(desk, batch)
    fields = desk.control.batch_cancel("enough") if word == "cancel" else ""
    return await requests_of(desk).ask(manifest, word, request or f"{word} once", fields)
