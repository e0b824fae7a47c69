"""Finds the strategy of a name or a reference, and makes it with its options."""

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from stepfleet.orchestrator.agents.strategies.chain_of_thought import ChainOfThought
from stepfleet.orchestrator.agents.strategies.noop import NoOp
from stepfleet.orchestrator.agents.strategies.react import ReAct
from stepfleet.orchestrator.agents.strategies.strategy import OutputMode, Strategy
from stepfleet.orchestrator.errors import AgentException, ConfigurationError
from stepfleet.orchestrator.records.text.articles import with_article
from stepfleet.orchestrator.references import load_reference

ENTRY_POINTS = "stepfleet.strategies"
"""Packages register strategies by entry points of this group: `name = "package:Class"`."""
OBJECT = "object:"
"""Prefix of the stored name of a strategy that was given as an object."""
BUILT_IN: Mapping[str, type[Strategy]] = {
    "noop": NoOp,
    "react": ReAct,
    "chain_of_thought": ChainOfThought,
    "cot": ChainOfThought,
}


def is_reference(name: str) -> bool:
    """Return whether `name` points into code: `module:attribute`, or a given object."""
    return ":" in name


def stored_name(strategy: Strategy | str) -> str:
    """Return the name of a strategy in a run's configuration."""
    return strategy if isinstance(strategy, str) else f"{OBJECT}{type(strategy).__name__}"


def json_strategy(name: str | None, options: Mapping[str, Any]) -> str | None:
    """Return the class of a built-in strategy that is in JSON mode; None for all others.

    The modes of other strategies are known only where their code is.
    """
    kind = BUILT_IN.get(name or "")
    in_json_mode = kind and (options.get("mode") or kind.default_mode) == OutputMode.JSON
    return kind.__name__ if kind and in_json_mode else None


def make_strategy(name: str, options: Mapping[str, Any]) -> Strategy:
    """Return the strategy of that registered name or `module:attribute` reference.

    Raises `ConfigurationError` that names the field and the fix.
    """
    found = load_reference(name, "field 'strategy'") if is_reference(name) else _registered(name)
    if isinstance(found, Strategy):
        if options:
            msg = f"field 'strategy_options': {name!r} is a finished object; name its class instead"
            raise ConfigurationError(msg)
        return found
    return _made(name, found, options)


def _made(name: str, factory: Any, options: Mapping[str, Any]) -> Strategy:
    if not callable(factory):
        kind = with_article(type(factory).__name__)
        msg = f"field 'strategy': {name!r} is {kind}, neither class nor object"
        raise ConfigurationError(msg)
    try:
        made: Any = factory(**options)
    except AgentException:
        raise
    except Exception as error:
        msg = f"field 'strategy_options': {name!r} cannot be made with them: {error}"
        raise ConfigurationError(msg) from error
    if not isinstance(made, Strategy):
        msg = f"field 'strategy': {name!r} made a {type(made).__name__}; subclass Strategy"
        raise ConfigurationError(msg)
    return made


def _registered(name: str) -> Callable[..., Any]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    for found in metadata.entry_points(group=ENTRY_POINTS, name=name):
        factory: Callable[..., Any] = found.load()
        return factory
    known = ", ".join(sorted(BUILT_IN))
    raise ConfigurationError(
        f"field 'strategy': there is no strategy {name!r} (known: {known}); name one of them, a "
        f"reference 'module:attribute', or an entry point in {ENTRY_POINTS!r}"
    )
