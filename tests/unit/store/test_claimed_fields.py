"""The fields that claim.lua returns have the names and the order in which they are read."""

import re

from stepfleet.orchestrator.store.lua import source
from stepfleet.orchestrator.store.runs.steps import CLAIMED


def test_a_claim_returns_the_fields_that_are_read_in_their_order() -> None:
    found = re.search(r"local header = redis\.call\('HMGET', run_key,([^)]*)\)", source("claim"))

    assert found is not None
    assert tuple(re.findall(r"'(\w+)'", found[1])) == CLAIMED
