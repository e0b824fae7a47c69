from importlib.metadata import EntryPoint
from typing import Any

import pytest

from stepfleet.orchestrator import (
    Agent,
    AgentConfig,
    ChainOfThought,
    ConfigurationError,
    NoOp,
    Planning,
    ReAct,
    Strategy,
    tool,
)
from stepfleet.orchestrator.agents.agent import reasoner_of
from stepfleet.orchestrator.agents.strategies import (
    OutputMode,
    StrategyReasoner,
    built_in,
    make_strategy,
)

REFERENCE = "stepfleet.orchestrator.agents.strategies.built_in:ReAct"


@pytest.mark.parametrize(
    ("name", "kind", "mode"),
    [
        ("noop", NoOp, OutputMode.TEXT),
        ("react", ReAct, OutputMode.JSON),
        ("chain_of_thought", ChainOfThought, OutputMode.JSON),
        ("cot", ChainOfThought, OutputMode.JSON),
        (REFERENCE, ReAct, OutputMode.JSON),
    ],
)
def test_a_name_or_a_reference_makes_a_strategy(
    name: str, kind: type[Strategy], mode: OutputMode
) -> None:
    """STRAT-06, STRAT-07"""
    agent = Agent("a", model="openai:m", strategy=name)
    assert type(agent.strategy) is kind
    assert agent.strategy.mode is mode
    assert agent.config.strategy == name
    assert AgentConfig.from_json(agent.config.to_json()) == agent.config


def test_an_object_is_remembered_by_its_class() -> None:
    """STRAT-06: an object itself is never stored."""
    given = ReAct(mode="text")
    agent = Agent("a", model="openai:m", strategy=given)
    assert agent.strategy is given
    assert agent.config.strategy == "object:ReAct"


def test_packages_register_strategies_by_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """STRAT-06"""
    point = EntryPoint("mine", REFERENCE, built_in.ENTRY_POINTS)

    def entry_points(group: str, name: str) -> list[EntryPoint]:
        return [point] if (group, name) == (built_in.ENTRY_POINTS, "mine") else []

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    made = make_strategy("mine", {"verbose": True})
    assert isinstance(made, ReAct)
    assert made.verbose


READY = ReAct(mode="text")


def factory() -> object:
    return object()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strategy": "raect"}, r"there is no strategy 'raect' \(known: chain_of_thought, cot"),
        (
            {"strategy": "nowhere.at.all:X"},
            "cannot be loaded: there is no module 'nowhere'",
        ),
        (
            {"strategy": "json:Nothing"},
            "cannot be loaded: module 'json' has no 'Nothing'",
        ),
        ({"strategy": ":x"}, "':x' cannot be loaded: it names no module"),
        ({"strategy": "json:dumps"}, "'strategy_options': 'json:dumps' cannot be made"),
        ({"strategy": "sys:maxsize"}, "is an int, neither class nor object"),
        ({"strategy": "builtins:dict"}, "made a dict; subclass Strategy"),
        ({"strategy": 7}, "a int cannot be one; give a Strategy"),
        ({"strategy": NoOp}, "a ABCMeta cannot be one; give a Strategy"),
        ({"strategy": "noop", "strategy_options": {"x": 1}}, "unexpected keyword argument 'x'"),
        ({"strategy": "react", "strategy_options": {"mode": str}}, "must be JSON data"),
        ({"strategy": READY, "strategy_options": {"mode": "json"}}, "a finished object has its"),
        ({"strategy_options": {"mode": "json"}}, "there is no strategy; set strategy too"),
    ],
)
def test_a_strategy_that_is_none_is_refused(given: dict[str, Any], said: str) -> None:
    """STRAT-06, CONF-04: named by field and fix, when the agent is defined."""
    with pytest.raises(ConfigurationError, match=said):
        Agent("a", model="openai:m", **given)


@tool
def look(what: str) -> str:
    """Look."""
    return what


@tool
def update_plan(step: int) -> str:
    """Mine."""
    return str(step)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strategy": "noop", "strategy_options": {"mode": "json"}}, "NoOp: mode 'json' does not"),
        ({"strategy": "react", "strategy_options": {"mode": "xml"}}, "give 'text' or 'json'"),
        ({"strategy": "react", "tool_choice": "any"}, "'tool_choice': 'any' needs native tool"),
        ({"strategy": "cot", "tool_choice": "look"}, "'tool_choice': 'look' needs native tool"),
        (
            {
                "strategy": "react",
                "settings": {"extra_body": {"response_format": {"type": "text"}}},
            },
            "'settings.extra_body.response_format' contradicts the JSON mode",
        ),
    ],
)
def test_a_wrong_mode_is_refused(given: dict[str, Any], said: str) -> None:
    """STRAT-07, CONF-04"""
    with pytest.raises(ConfigurationError, match=said):
        Agent("a", model="openai:m", tools=[look], **given)


def test_native_calls_may_be_demanded_in_text_mode() -> None:
    """STRAT-07"""
    options = {"mode": "text"}
    agent = Agent(
        "a", model="openai:m", strategy="react", strategy_options=options, tool_choice="any"
    )
    assert agent.config.tool_choice == "any"


@pytest.mark.parametrize("name", ["strategy", "strategy_options"])
def test_who_submits_a_line_does_not_choose_what_code_runs(name: str) -> None:
    """STRAT-06: a reference names code of the worker."""
    value = REFERENCE if name == "strategy" else {"mode": "text"}
    with pytest.raises(ConfigurationError, match=f"'{name}' cannot be overridden per run"):
        Agent("a", model="openai:m", strategy="react").config.with_overrides({name: value})


def test_a_run_keeps_the_strategy_that_it_started_with() -> None:
    """STRAT-06, CONF-07: a registered one is made anew, code that is gone is missed."""
    started = Agent("a", model="openai:m", strategy="cot").config
    deployed = Agent("a", model="openai:m", strategy="react")
    reasoner = reasoner_of(started, deployed)
    assert isinstance(reasoner, StrategyReasoner)
    assert isinstance(reasoner.strategy, ChainOfThought)
    by_object = Agent("a", model="openai:m", strategy=READY)
    with pytest.raises(ConfigurationError, match="'object:ReAct', which its code on this worker"):
        reasoner_of(by_object.config, deployed)
    again = reasoner_of(by_object.config, by_object)
    assert isinstance(again, StrategyReasoner)
    assert again.strategy is READY


def test_a_plain_agent_has_no_reasoner() -> None:
    agent = Agent("a", model="openai:m", tools=[look])
    assert reasoner_of(agent.config, agent) is None


def test_the_tool_of_tracked_plans_is_the_plannings_own() -> None:
    """PLAN-07"""
    with pytest.raises(ConfigurationError, match="'update_plan' is the planning's own"):
        Agent("a", model="openai:m", tools=[update_plan], planning=Planning(tracked=True))
    with pytest.raises(ConfigurationError, match=r"field 'planning'.*never plans"):
        Agent("a", model="openai:m", planning={"at_start": False})
