"""Names of overrides that come from outside: none of them is another keyword of a call."""

import inspect

import pytest

from stepfleet.orchestrator import AsyncBatch, ConfigurationError
from stepfleet.orchestrator.agents.config import named_overrides
from stepfleet.orchestrator.client.history import AsyncFleetHistory
from stepfleet.orchestrator.client.runs import AsyncFleetRuns

CALLS = (AsyncBatch.retry, AsyncFleetRuns.retry, AsyncFleetRuns.send, AsyncFleetHistory.fork)


def test_overrides_of_runs_are_taken_as_they_are() -> None:
    given = {"max_steps": 3, "settings": {"temperature": 0}, "metadata": {"a": 1}}
    assert named_overrides(given) == given


@pytest.mark.parametrize("call", CALLS)
def test_no_keyword_of_a_call_is_an_override(call: object) -> None:
    names = [
        name
        for name, one in inspect.signature(call).parameters.items()  # type: ignore[arg-type]
        if one.kind is not one.VAR_KEYWORD and name != "metadata"
    ]
    assert len(names) > 1
    for name in names:
        with pytest.raises(ConfigurationError, match=f"field '{name}' "):
            named_overrides({name: 1})


def test_a_wrong_name_is_reported_with_the_one_that_is_meant() -> None:
    """CONF-04"""
    with pytest.raises(ConfigurationError, match="'max_step' is not known; did you mean 'max_st"):
        named_overrides({"max_step": 3})
    with pytest.raises(ConfigurationError, match="'pricing' cannot be overridden per run"):
        named_overrides({"pricing": {}})
