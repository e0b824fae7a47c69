"""Values that only type checkers keep frozen behave like frozen dataclasses otherwise."""

import copy
from dataclasses import replace

from stepfleet.orchestrator.protocol.claim import Work


def test_a_value_is_equal_hashed_and_copied_by_its_fields() -> None:
    work = Work("r", 1)
    same = [Work("r", 1), copy.deepcopy(work)]
    assert {work, *same} == {work}
    assert replace(work, step=2) == Work("r", 2) != work
