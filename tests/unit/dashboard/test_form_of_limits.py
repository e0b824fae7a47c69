"""The form of Flower's page has every field of a limit."""

import re

from stepfleet.orchestrator.dashboard.web import OWN
from stepfleet.orchestrator.limits.limit import Limit


def test_the_form_has_every_field_of_a_limit() -> None:
    code = (OWN / "static" / "fleet_limits.js").read_text()
    lists = re.findall(r"const (?:RATES|BUDGETS|FIELDS) = \[(.*?)\];", code)
    assert {name for text in lists for name in re.findall(r'"(\w+)"', text)} == set(
        Limit.model_fields
    )
