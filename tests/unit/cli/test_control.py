import pytest

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.cli.inputs import overrides_of
from stepfleet.orchestrator.cli.steer import check_target


def test_raised_limits_become_overrides_of_their_own_types() -> None:
    given = ["max_steps=20", "budget_usd=0.5", "model=openai:gpt-4o", "time_limit=null"]

    assert overrides_of(given) == {
        "max_steps": 20,
        "budget_usd": 0.5,
        "model": "openai:gpt-4o",
        "time_limit": None,
    }


@pytest.mark.parametrize("given", ["max_steps", "=3", "max_steps="])
def test_a_raise_without_name_or_value_is_refused_with_the_form(given: str) -> None:
    with pytest.raises(ConfigurationError, match="FIELD=VALUE"):
        overrides_of([given])


def test_neither_run_nor_batch_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--batch"):
        check_target(None, None)
