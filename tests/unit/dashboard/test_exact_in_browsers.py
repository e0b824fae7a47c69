"""Whole numbers on pages: those that JavaScript would round are text there."""

import json

from stepfleet.orchestrator.dashboard.access import MOST_EXACT, exact_in_browsers


def test_numbers_that_a_browser_would_round_are_text() -> None:
    amounts = {"wei": 10**25, "all": [MOST_EXACT, MOST_EXACT + 1, -(2**60), True, 1.5, "x", None]}
    shown = exact_in_browsers(amounts)
    assert shown == {
        "wei": "10000000000000000000000000",
        "all": [MOST_EXACT, "9007199254740992", "-1152921504606846976", True, 1.5, "x", None],
    }
    as_a_browser = json.loads(json.dumps(shown), parse_int=lambda digits: int(float(digits)))
    assert as_a_browser == shown
