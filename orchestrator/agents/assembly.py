"""Assembles a run's reasoner: its strategy, template and planning around its answer contract.

Decides which strategy counts: a run keeps the one that it started with. Knows no worker.
"""

from collections.abc import Sequence
from typing import Any

from stepfleet.orchestrator.agents.answers.contract import AnswerContract
from stepfleet.orchestrator.agents.answers.special import SpecialTool
from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.agents.planning import PlanningReasoner
from stepfleet.orchestrator.agents.planning.plan import UPDATE_PLAN
from stepfleet.orchestrator.agents.reasoner import Reasoner, chain_of
from stepfleet.orchestrator.agents.strategies import (
    NoOp,
    OutputMode,
    Strategy,
    StrategyReasoner,
    make_strategy,
)
from stepfleet.orchestrator.agents.strategies.lookup import is_reference
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.text.articles import with_article
from stepfleet.orchestrator.tools.schemas.bounded_json import BoundsError, plain_json
from stepfleet.orchestrator.tools.schemas.handles import handle_of


def contract_of(config: AgentConfig, specials: Sequence[SpecialTool]) -> AnswerContract | None:
    """Return the answer contract of runs of `config`, or None where any text ends them.

    Raises `ConfigurationError` where `specials` lack one that the run was started with.
    """
    if not config.demands_answer and not config.special_tools:
        return None
    known = {one.name: one for one in specials}
    missing = [name for name in config.special_tools if name not in known]
    if missing:
        raise ConfigurationError(
            f"agent {config.name!r} on this worker has no special tool {missing[0]!r}, which the "
            "run was started with; deploy it again under that name"
        )
    return AnswerContract(
        handle_of(config.output_schema) if config.output_schema is not None else None,
        required=config.demands_answer,
        native=config.answers_natively,
        # Messages that a strategy words may be JSON of its own.
        by_tool_alone=config.strategy is not None,
        specials=(known[name] for name in config.special_tools),
        has_tools=bool(config.tools or config.mcp_servers or config.planning or config.strategy),
    )


def check_contract(config: AgentConfig, specials: Sequence[SpecialTool]) -> None:
    """Raise `ConfigurationError` where an answer contract cannot be kept, or the agent stored."""
    wrong = [one for one in specials if not isinstance(one, SpecialTool)]
    if wrong:
        kind = with_article(type(wrong[0]).__name__)
        msg = f"agent {config.name!r}: special_tools holds {kind}; give SpecialTool objects"
        raise ConfigurationError(msg)
    config.check_answer()
    config.check_storable()


def strategy_of(config: AgentConfig, given: Any) -> Strategy | None:
    """Return the strategy of an agent in code, made with its options and checked.

    Raises `ConfigurationError` that names the field and the fix.
    """
    if isinstance(given, Strategy) and config.strategy_options:
        msg = "field 'strategy_options': a finished object has its options; give its name instead"
        raise ConfigurationError(msg)
    try:
        plain_json(config.strategy_options)
    except BoundsError as error:
        msg = f"field 'strategy_options': they are stored, so they must be JSON data: {error}"
        raise ConfigurationError(msg) from None
    if given is not None and not isinstance(given, Strategy | str):
        kind = type(given).__name__
        msg = f"field 'strategy': a {kind} is none; give a Strategy, a name or 'module:attribute'"
        raise ConfigurationError(msg)
    made: Strategy | None = (
        make_strategy(given, config.strategy_options) if isinstance(given, str) else given
    )
    if made is None and config.strategy_options:
        raise ConfigurationError("field 'strategy_options': there is no strategy; set strategy too")
    check_reasoning(config, made)
    return made


def check_reasoning(config: AgentConfig, strategy: Strategy | None) -> None:
    """Raise `ConfigurationError` where a configuration contradicts its strategy or its plans."""
    tracked = config.planning is not None and config.planning.tracked
    names = {*config.special_tools, *(tool.name for tool in config.tools)}
    if tracked and UPDATE_PLAN in names:
        msg = f"tool {UPDATE_PLAN!r} is the planning's own; rename yours, or set tracked=False"
        raise ConfigurationError(msg)
    in_json_mode = strategy is not None and strategy.mode is OutputMode.JSON
    name = type(strategy).__name__ if in_json_mode else None
    config.check_tool_choice(name)
    if name is None:
        return
    if config.answer_mode == "native" and config.output_schema is not None:
        raise ConfigurationError(
            f"field 'answer_mode': 'native' and the JSON mode of strategy {name} both set the form "
            "of messages; use answer_mode 'tool', or strategy_options={'mode': 'text'}"
        )
    for field in ("response_format", "tools"):
        if field in config.settings.extra_body:
            raise ConfigurationError(
                f"field 'settings.extra_body.{field}' contradicts the JSON mode of strategy "
                f"{name}; remove it, or use strategy_options={{'mode': 'text'}}"
            )


def reasoning_of(
    config: AgentConfig,
    own: AgentConfig,
    strategy: Strategy | None,
    contract: Reasoner | None = None,
) -> Reasoner | None:
    """Return the reasoner of a run of `config`, around `contract`; None for a plain agent.

    `own` is the configuration of the agent's code here and `strategy` its strategy. Raises
    `ConfigurationError` where the run started with another one that is not here.
    """
    chosen = _chosen(config, own, strategy)
    if chosen is None and config.user_template is not None:
        chosen = NoOp()
    # The contract first: its tools are worded as the strategy words all tools.
    led = chain_of(contract, StrategyReasoner(chosen, config.user_template) if chosen else None)
    if config.planning is None:
        return led
    as_text = chosen is not None and chosen.mode is OutputMode.JSON
    return PlanningReasoner(config.planning, led, calls_as_text=as_text)


def _chosen(config: AgentConfig, own: AgentConfig, strategy: Strategy | None) -> Strategy | None:
    if config.strategy is None:
        return None
    if (config.strategy, config.strategy_options) == (own.strategy, own.strategy_options):
        return strategy
    if is_reference(config.strategy):
        # This worker's code decides about imports, never the store.
        raise ConfigurationError(
            f"the run of agent {config.name!r} was started with strategy {config.strategy!r}, "
            f"which its code on this worker does not name any more; deploy it again"
        )
    return make_strategy(config.strategy, config.strategy_options)
