"""Whom runs are for: given once, it stays with a run and all that becomes of it."""

import json
from pathlib import Path
from uuid import uuid4

import pytest
from support.runs.stored_runs import Bench, answered, failed, plain_agent

from stepfleet.orchestrator import AsyncFleet, ConfigurationError
from stepfleet.orchestrator.store.batches.batches import run_id_of

AGENT = plain_agent()


async def tenant_of(fleet: AsyncFleet, run_id: str) -> str | None:
    return (await fleet.runs.result(run_id)).tenant


async def test_a_run_its_children_forks_and_checkpoints_have_its_tenant(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await fleet.submit(AGENT, "hello", tenant="acme")
    child = await fleet.submit(AGENT, "hello", parent=run_id)
    lent = await fleet.submit(AGENT, "hello", parent=run_id, tenant="other")
    plain = await fleet.submit(AGENT, "hello")
    claim = await desk.claim(run_id)
    assert claim.tenant == "acme"
    await desk.commit(claim, answered(claim))
    events = [event async for event in fleet.runs.events(run_id)]
    assert [one["payload"].get("tenant") for one in events] == ["acme", None, None, "acme", "acme"]
    fork = await fleet.history.fork(run_id, at=0)
    checkpoint = await fleet.history.checkpoint(run_id)
    copy = await fleet.history.restore(checkpoint, AGENT, run_id=str(uuid4()))
    found = [await tenant_of(fleet, one) for one in (run_id, child, lent, plain, fork, copy)]
    assert found == ["acme", "acme", "other", None, "acme", "acme"]


async def test_lines_name_their_tenants_and_the_batch_that_of_the_others(
    fleet: AsyncFleet, tmp_path: Path
) -> None:
    file = tmp_path / "lines.jsonl"
    lines = [{"input": "a", "tenant": "acme"}, {"input": "b"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    batch = await fleet.submit_batch(file, AGENT, tenant="other")
    found = [await tenant_of(fleet, run_id_of(batch.id, row)) for row in (0, 1)]
    assert found == ["acme", "other"]
    without = await fleet.submit_batch(file, AGENT)
    assert without.id != batch.id
    assert await tenant_of(fleet, run_id_of(without.id, 1)) is None


@pytest.mark.parametrize("name", ["", " acme", "a b", "-a", "a" * 65, "ä", "a\n", 5])
async def test_what_is_no_name_is_refused_before_anything_is_created(
    fleet: AsyncFleet, desk: Bench, name: object
) -> None:
    with pytest.raises(ConfigurationError, match=r"field 'tenant' is .*; write 1 to 64 letters"):
        await fleet.submit(AGENT, "hello", tenant=name)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="field 'tenant' is"):
        await fleet.submit_batch([{"input": "a", "tenant": name}], AGENT)
    assert await desk.queued() == 0


async def test_a_retry_takes_the_runs_of_one_tenant(fleet: AsyncFleet, desk: Bench) -> None:
    lines = [{"input": one, "tenant": one} for one in ("acme", "other")]
    batch = await fleet.submit_batch(lines, AGENT)
    for row in (0, 1):
        claim = await desk.claim(run_id_of(batch.id, row))
        await desk.commit(claim, failed(claim))
    assert await batch.retry(where="tenant=acme") == 1
