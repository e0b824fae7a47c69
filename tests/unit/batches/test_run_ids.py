"""Ids of a batch's runs follow from batch and row alone."""

from uuid import UUID, uuid5

import pytest

from stepfleet.orchestrator.store.batches.batches import batch_id_of, run_id_of


@pytest.mark.parametrize("row", [0, 1, 9, 10, 123_456, 10**9])
@pytest.mark.parametrize("key", ["", "nightly", "Zoë"])
def test_a_runs_id_is_the_uuid_of_version_5_of_its_row(key: str, row: int) -> None:
    batch = batch_id_of(key)
    assert run_id_of(batch, row) == str(uuid5(UUID(batch), str(row)))
