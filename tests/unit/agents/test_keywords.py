"""Typed keyword arguments name what the configuration and the methods take, no more and no less."""

import inspect
from collections.abc import Callable
from typing import Any, Unpack

import pytest

from stepfleet.orchestrator import (
    Agent,
    AgentConfig,
    AgentKeywords,
    AsyncBatch,
    AsyncFleet,
    AsyncFleetHistory,
    AsyncFleetRuns,
    BatchOptions,
    RestoreOptions,
    RunOptions,
    RunOverrides,
    SubmitOptions,
)
from stepfleet.orchestrator.agents.config import NOT_PER_RUN

FIELDS = set(AgentConfig.model_fields)
FORM = {
    "input_field",
    "id_field",
    "input_format",
    "only_new",
    "tenant",
    "priority",
    "limit",
    "after",
}
SUBMITTED = {
    *("run_id", "idempotency_key", "metadata", "delay", "parent", "tenant", "priority", "limit"),
    *("after", "after_failed"),
}


def own_of(function: Callable[..., Any]) -> set[str]:
    """Return the arguments that a function names itself."""
    return {
        name
        for name, one in inspect.signature(function).parameters.items()
        if one.kind is not inspect.Parameter.VAR_KEYWORD
    }


def keywords_of(function: Callable[..., Any]) -> Any:
    """Return the type of a function's further keyword arguments."""
    (found,) = [
        one.annotation
        for one in inspect.signature(function).parameters.values()
        if one.kind is inspect.Parameter.VAR_KEYWORD
    ]
    return found


def test_an_agent_names_every_field_of_its_configuration() -> None:
    """CONF-01: `tools` and `mcp_servers` come from its tools."""
    named = set(AgentKeywords.__annotations__) | own_of(Agent)
    assert FIELDS - named == {"mcp_servers"}
    assert set(AgentKeywords.__annotations__) - FIELDS == set()
    assert set(AgentKeywords.__annotations__) & own_of(Agent) == set()


def test_a_run_names_every_field_that_it_may_change() -> None:
    """CONF-01: its metadata are an argument of their own."""
    assert set(RunOverrides.__annotations__) == FIELDS - set(NOT_PER_RUN) - {"metadata"}


def test_options_are_overrides_and_the_methods_own_arguments() -> None:
    overrides = set(RunOverrides.__annotations__)
    assert set(SubmitOptions.__annotations__) == overrides | SUBMITTED
    assert set(RunOptions.__annotations__) == overrides | SUBMITTED | {"timeout"}
    assert set(BatchOptions.__annotations__) == overrides | FORM
    assert set(RestoreOptions.__annotations__) == overrides | {"run_id"}
    assert own_of(AsyncFleet.submit) == {"self", "agent", "input"}
    assert own_of(AsyncFleet.run_with_steps) == {"self", "agent", "input", "timeout"}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (Agent, AgentKeywords),
        (AsyncFleet.submit, SubmitOptions),
        (AsyncFleet.submit_batch, BatchOptions),
        (AsyncFleet.run, RunOptions),
        (AsyncFleet.run_with_messages, RunOptions),
        (AsyncFleet.run_with_steps, SubmitOptions),
        (AsyncFleet.run_stream, SubmitOptions),
        (AsyncFleetRuns.retry, RunOverrides),
        (AsyncFleetRuns.send, RunOverrides),
        (AsyncFleetHistory.fork, RunOverrides),
        (AsyncFleetHistory.restore, RunOverrides),
        (AsyncFleetHistory.load_state, RestoreOptions),
        (AsyncBatch.retry, RunOverrides),
    ],
)
def test_keywords_are_typed(function: Callable[..., Any], expected: Any) -> None:
    """QUAL-05: editors complete them, type checkers check them."""
    assert keywords_of(function) == Unpack[expected]
