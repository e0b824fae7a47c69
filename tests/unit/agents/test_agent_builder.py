"""Building an agent call by call."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel
from support.runs.agent_records import a_state
from support.runs.scripted_steps import Script, say

from stepfleet.orchestrator import (
    Agent,
    AgentBuilder,
    AgentConfig,
    BroadcastConfig,
    ConfigurationError,
    ContinuationDecision,
    ErrorPolicy,
    MemoryPolicy,
    ModelSettings,
    Subscribers,
    tool,
    when,
)
from stepfleet.orchestrator.agents.agent import criteria_of
from stepfleet.orchestrator.agents.config import stored_overrides


class Price(BaseModel):
    """What the agent is to find."""

    usd: float


@tool(read_only=True)
def look(what: str) -> str:
    """Look something up."""
    return what


@tool(read_only=True)
def ask(whom: str) -> str:
    """Ask somebody."""
    return whom


BASE = AgentBuilder("clerk").with_model("openai:m")


def test_a_chain_of_calls_is_what_the_agent_is() -> None:
    """CONF-02"""
    steps = when(lambda _: ContinuationDecision.ALLOW_CONTINUATION)
    subscribers = Subscribers()
    agent = (
        AgentBuilder("clerk")
        .with_model("openai:gpt-4o-mini")
        .with_base_url("https://models.example/v1", api_key_env="MY_KEY")
        .with_max_iterations(7)
        .with_max_tokens(500)
        .with_timeout(12)
        .with_system_prompt("Be brief.")
        .with_tools(look)
        .with_tools(ask)
        .with_criteria(steps)
        .with_error_policy(ErrorPolicy.retry_all(4))
        .with_cumulative_timeout(60)
        .with_budget(0.5)
        .with_memory(MemoryPolicy(max_messages=20))
        .with_strategy("react")
        .with_output_type(Price)
        .with_events("debug")
        .with_events(subscribers)
        .with_fields(model_attempts=2)
        .build()
    )
    config = agent.config
    assert (config.model, config.max_steps, config.instructions) == (
        "openai:gpt-4o-mini",
        7,
        "Be brief.",
    )
    assert config.settings == ModelSettings(
        base_url="https://models.example/v1", api_key_env="MY_KEY", max_tokens=500, timeout=12
    )
    assert [one.name for one in config.tools] == ["look", "ask"]
    assert agent.criteria == (steps,)
    assert config.error_policy == ErrorPolicy.retry_all(4)
    assert (config.cumulative_timeout, config.budget_usd, config.model_attempts) == (60, 0.5, 2)
    assert (config.memory.max_messages, config.strategy) == (20, "react")
    assert config.output_schema is not None
    assert config.output_schema["title"] == "Price"
    assert (config.broadcast, agent.subscribers) == (BroadcastConfig.debug(), subscribers)


def test_a_schema_can_be_taken_back() -> None:
    """CONF-02: text is an answer again."""
    asked = BASE.with_output_type(Price, mode="native")
    assert asked.build().config.demands_answer
    plain = asked.without_output_type().build().config
    assert (plain.demands_answer, plain.answer_mode) == (False, "tool")


def test_every_call_leaves_the_builder_before_it_alone() -> None:
    """CONF-02"""
    shared = BASE.with_settings(temperature=0)
    hot = shared.with_settings(temperature=1).with_tools(look).build()
    assert shared.build().config == BASE.with_settings(temperature=0).build().config
    assert hot.config.settings.temperature == 1
    assert not shared.build().config.tools


def test_a_model_object_can_be_built_in() -> None:
    """CONF-02"""
    model = Script([say("hi")])
    assert AgentBuilder("clerk").with_model(model).build().llm is model


def test_what_is_not_said_stays_at_the_defaults_of_agents() -> None:
    """CONF-03: 32,768 tokens and 300 seconds, as the criteria compare them."""
    agent = BASE.build()
    assert agent.config == Agent("clerk", model="openai:m").config
    outcome = criteria_of(agent.config, agent).evaluate(a_state(steps=1))
    limits = {one.criterion: one.context.get("limit") for one in outcome.evaluations}
    assert (limits["TokenUsageLimit"], limits["ExecutionTimeLimit"]) == (32_768, 300)
    assert limits["StepsLimit"] == 10


def test_a_limit_is_switched_off_by_none() -> None:
    config = BASE.with_token_limit(None).with_time_limit(None).build().config
    assert (config.token_limit, config.time_limit) == (None, None)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: BASE.with_max_iterations(-1), "'max_steps'"),
        (lambda: BASE.with_timeout(0), "'settings.timeout'"),
        (lambda: BASE.with_fields(tool_choice="lok"), "'tool_choice': 'lok' is neither"),
        (lambda: BASE.with_fields(answer_mode="native"), "needs an output_type"),
        (lambda: BASE.with_output_type(int | None), "'output_type'"),
        (lambda: BASE.with_fields(max_step=3), "'max_step' is not known"),
        (lambda: BASE.with_error_policy("retry"), "'error_policy': 'retry' is not a preset"),
        (lambda: BASE.with_settings(api_key="sk-1"), "'settings.api_key' is not known"),
        (lambda: AgentBuilder("clerk"), "field 'model' is missing"),
    ],
)
def test_what_is_wrong_is_reported_when_the_agent_is_built(
    wrong: Callable[[], AgentBuilder], said: str
) -> None:
    """CONF-04"""
    with pytest.raises(ConfigurationError, match=said):
        wrong().build()


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_steps", -1), ("tool_choice", "lok"), ("answer_mode", "native"), ("model", "")],
)
def test_what_is_wrong_with_a_run_is_reported_when_it_is_submitted(field: str, value: Any) -> None:
    """CONF-04: by the check that every submission makes."""
    with pytest.raises(ConfigurationError, match=field):
        stored_overrides(BASE.build().config, {field: value})


def test_an_agent_needs_two_things_and_has_presets_for_the_rest() -> None:
    """CONF-10: new fields are reviewed here; what tunes the model stands in `settings` alone."""
    needed = [name for name, field in AgentConfig.model_fields.items() if field.is_required()]
    assert needed == ["name", "model"]
    assert len(AgentConfig.model_fields) <= 34
    in_settings = set(ModelSettings.model_fields)
    assert not in_settings & set(AgentConfig.model_fields)
    presets = BASE.with_error_policy("retry_tool_errors").with_events("standard").build().config
    assert presets.error_policy == ErrorPolicy.retry_tool_errors()
    assert presets.broadcast == BroadcastConfig.standard()


def test_an_agent_has_its_usual_settings_by_default() -> None:
    """CONF-01: without prices of its own it has those of its workers."""
    config = AgentConfig(name="a", model="openai:m")
    assert (config.max_steps, config.parallel_tool_execution) == (10, False)
    assert (config.user_template, config.strategy, config.tools) == (None, None, ())
    assert config.memory == MemoryPolicy()
    assert not config.memory.active
    assert (config.pricing, config.cache) == ({}, None)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_step": 3}, "'max_step' is not known; did you mean 'max_steps'"),
        ({"settings": {"temprature": 0}}, "'settings.temprature' .*; did you mean 'temperature'"),
        ({"planning": {"evry": 2}}, "'planning.evry' is not known; did you mean 'every'"),
        ({"colour": "red"}, "'colour' is not known$"),
        ({"model": "gpt-4o"}, "'model': 'gpt-4o' must name its provider; write 'openai:gpt-4o'"),
        ({"memory": {"summary_model": "small", "summarize_after": 9}}, "'summary_model': 'small'"),
    ],
)
def test_a_slip_is_reported_with_what_may_be_meant(fields: dict[str, Any], told: str) -> None:
    """CONF-04: where the agent is made, and not in a run."""
    with pytest.raises(ConfigurationError, match=told):
        Agent("clerk", **{"model": "openai:m", **fields})


def test_a_runs_own_model_must_name_its_provider_when_it_is_submitted() -> None:
    """CONF-04"""
    with pytest.raises(ConfigurationError, match="write 'openai:gpt-4o'"):
        stored_overrides(BASE.build().config, {"model": "gpt-4o"})
