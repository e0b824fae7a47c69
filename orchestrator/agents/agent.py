"""An agent in code: its configuration, and the parts that cannot be stored, such as tools.

A run stores the configuration it started with; workers find the code by the agent's name.
"""

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack, get_args

from pydantic import ValidationError

from stepfleet.orchestrator.agents.answers.contract import AnswerContract
from stepfleet.orchestrator.agents.answers.definitions import SpecialTool
from stepfleet.orchestrator.agents.config import AgentConfig, AgentKeywords, ToolRef
from stepfleet.orchestrator.agents.planning import UPDATE_PLAN, PlanningReasoner
from stepfleet.orchestrator.agents.reasoner import Reasoner, chain_of
from stepfleet.orchestrator.agents.strategies import (
    NoOp,
    OutputMode,
    Strategy,
    StrategyReasoner,
    make_strategy,
    stored_name,
)
from stepfleet.orchestrator.agents.strategies.built_in import is_reference
from stepfleet.orchestrator.agents.sub_agents import (
    AgentTool,
    HandoffTool,
    agent_tool,
    handoff_tool,
    tools_of_agents,
    tools_of_handoffs,
)
from stepfleet.orchestrator.continuation import (
    CanDecideToContinue,
    ContinuationCriteria,
    base_criteria,
)
from stepfleet.orchestrator.continuation.drivers import WorkAssumed
from stepfleet.orchestrator.continuation.error_policy import (
    ErrorContextResolver,
    ErrorPolicy,
    resolve,
)
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.events.subscribers import Subscribers
from stepfleet.orchestrator.memory.policy import Memory
from stepfleet.orchestrator.models.llm import LLM
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.answers import Awaited
from stepfleet.orchestrator.records.text.validation import explain_invalid, meant, with_article
from stepfleet.orchestrator.tools import Middleware, Tool, ToolRegistry, registry_of, tools_of
from stepfleet.orchestrator.tools.schemas.bounded_json import BoundsError, check_nesting, plain_json
from stepfleet.orchestrator.tools.schemas.handles import handle_of, schema_of


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
        msg = f"field 'strategy': a {kind} cannot be one; give a Strategy, name, 'module:attribute'"
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


PREFIX = "STEPFLEET_AGENT__"
"""`STEPFLEET_AGENT__SOLVER__MAX_STEPS` is the field `max_steps` of the agent `solver`."""
NONE = "none"
"""Switches a limit off, in a file and in the environment."""
POLICIES = ("stop_on_any_error", "retry_tool_errors", "ignore_tool_errors", "retry_all")
CODE = ("output_type", "criteria", "context", "subscribers", "special_tools", "middleware")
"""Arguments of `Agent` that a file names as `module:attribute`."""
TEXTS = ("instructions", "prompt", "user_template")
"""Fields whose text may begin with a bracket."""
FIELDS = frozenset(AgentConfig.model_fields) - {"name"} | {*CODE, "earlier_tools", "handoffs"}


def layered(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, `second` winning; where both are tables, field by field."""
    merged = dict(first)
    for name, value in second.items():
        before = _table(merged.get(name))
        if before is not None and isinstance(value, Mapping):
            merged[name] = layered(before, value)
        else:
            merged[name] = value
    return merged


def prefix_of(agent: str) -> str:
    """Return the prefix of an agent's variables."""
    return f"{PREFIX}{re.sub(r'[^A-Z0-9]', '_', agent.upper())}__"


def from_environment(name: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of the agent `name` in the environment, in the form of a file's table.

    Values are text, JSON where they begin with a bracket, or `none`. Raises `ConfigurationError`
    that names the variable.
    """
    prefix = prefix_of(name)
    found: dict[str, Any] = {}
    for variable in sorted(one for one in environment if one.startswith(prefix)):
        path = variable.removeprefix(prefix).lower().split("__")
        if path[0] not in FIELDS:
            close = meant(path[0], FIELDS) or "; docs/configuration.md lists them"
            msg = f"{variable}: an agent has no field {path[0]!r}{close}"
            raise ConfigurationError(msg)
        text = environment[variable]
        value: Any = text if path[0] in TEXTS else _value(variable, text)
        for part in reversed(path):
            value = {part: value}
        found = layered(found, value)
    return found


def with_limits_off(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's fields with `none` in the place of numbers read as no limit."""
    return {
        name: None if value == NONE and _may_be_none(name) else value
        for name, value in fields.items()
    }


def with_presets(agent: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with an error policy that is named by its preset made a policy.

    Raises `ConfigurationError` for an unknown name.
    """
    policy = fields.get("error_policy")
    if isinstance(policy, str):
        policy = {"preset": policy}
    if not isinstance(policy, Mapping) or "preset" not in policy:
        return dict(fields)
    rest = {name: value for name, value in policy.items() if name != "preset"}
    if policy["preset"] not in POLICIES:
        raise ConfigurationError(
            f"agent {agent!r}: field 'error_policy': {policy['preset']!r} is not a preset; write "
            f"one of {', '.join(POLICIES)}"
        )
    made: ErrorPolicy = getattr(ErrorPolicy, policy["preset"])()
    return {**fields, "error_policy": {**made.model_dump(), **rest}}


def _value(variable: str, text: str) -> Any:
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{variable} is not valid JSON: {error}") from None


def _table(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, Record):
        return value.model_dump(exclude_unset=True)
    return value if isinstance(value, Mapping) else None


def _may_be_none(name: str) -> bool:
    known = AgentConfig.model_fields.get(name)
    kinds = get_args(known.annotation) if known else ()
    return type(None) in kinds and str not in kinds


CUSTOM_MODEL = "custom:"


@dataclass(frozen=True, init=False)
class Agent:
    """An agent as code: a configuration, its tools, and its further criteria.

    Every field of `AgentConfig` is a keyword argument. `model` is a `provider:name` string, a list
    of them (the next one answers while one is out) or an object with the `LLM` protocol.
    `criteria` are appended to the base set. `context` is
    its memory beyond conversations, read before each model call. `strategy` is an
    object, a registered name or a `module:attribute` reference, made with `strategy_options`.
    `output_type` is the type of its answer's data: one that pydantic knows, or a JSON Schema.
    `special_tools` are calls that may end a run, answered by their own handlers.
    `middleware` goes around its model and tool calls, the first one outermost. `earlier_tools`
    are for runs that began with them; new runs are not offered any. `agents` are tools too: a
    call starts a run of that agent, and waits for its answer. `handoffs` are agents, or names of
    agents, that go on with the run in its place where the model calls `transfer_to_NAME`.
    Raises `ConfigurationError` that names the field and the fix.
    """

    config: AgentConfig
    tools: ToolRegistry
    criteria: tuple[CanDecideToContinue, ...] = ()
    llm: LLM | None = None
    failures: ErrorContextResolver | None = None
    subscribers: Subscribers | None = None
    context: Memory | None = None
    strategy: Strategy | None = None
    special_tools: tuple[SpecialTool, ...] = ()
    middleware: tuple[Middleware, ...] = ()
    earlier_tools: tuple[Tool[..., Any], ...] = ()

    def __init__(  # noqa: PLR0913 - one argument per thing that no record can hold
        self,
        name: str,
        *,
        model: str | Sequence[str] | LLM,
        tools: Iterable[Any] = (),
        criteria: Iterable[CanDecideToContinue] = (),
        failures: ErrorContextResolver | None = None,
        subscribers: Subscribers | None = None,
        context: Memory | None = None,
        strategy: Strategy | str | None = None,
        output_type: Any = None,
        special_tools: Iterable[SpecialTool] = (),
        middleware: Iterable[Middleware] = (),
        earlier_tools: Iterable[Any] = (),
        agents: Iterable["Agent"] = (),
        handoffs: Iterable["Agent | HandoffTool | str"] = (),
        **config: Unpack[AgentKeywords],
    ) -> None:
        others = (*tools_of_agents(agents, name), *tools_of_handoffs(handoffs, name))
        registry = _registry(name, tools, others)
        specials = tuple(special_tools)
        custom = not isinstance(model, str | list | tuple)
        fields = {
            "name": name,
            "model": f"{CUSTOM_MODEL}{type(model).__name__}" if custom else _named(name, model),
            "tools": tuple(
                ToolRef(name=one.name, version=str(getattr(one, "version", "1")))
                for one in registry
            ),
            "mcp_servers": tuple(
                ToolRef(name=one.name, version=one.version) for one in registry.servers
            ),
            **({} if strategy is None else {"strategy": stored_name(strategy)}),
            **({} if output_type is None else {"output_schema": _schema(name, output_type)}),
            "special_tools": tuple(str(getattr(one, "name", one)) for one in specials),
            **config,
        }
        check_nesting(fields.get("metadata"), "metadata")
        try:
            stored = AgentConfig.model_validate(fields)
        except ValidationError as error:
            why = explain_invalid(error, record=AgentConfig)
            raise ConfigurationError(f"agent {name!r}: {why}") from None
        stored.check_models()
        check_contract(stored, specials)
        vars(self).update(
            config=stored,
            tools=registry,
            criteria=tuple(criteria),
            llm=model if custom else None,
            failures=failures,
            subscribers=subscribers,
            context=context,
            strategy=strategy_of(stored, strategy),
            special_tools=specials,
            middleware=tuple(middleware),
            earlier_tools=tools_of(earlier_tools),
        )

    @property
    def name(self) -> str:
        """The name under which workers and batches find this agent."""
        return self.config.name

    @property
    def queues(self) -> frozenset[str]:
        """The queues of its tools, and of its sub-agents' tools; each needs workers."""
        tools = (*self.tools, *self.earlier_tools)
        named = (one.options.queue for one in tools)
        own = frozenset(one for one in named if one and not isinstance(one, Awaited))
        return own.union(*(one.queues for one in self.sub_agents))

    @property
    def sub_agents(self) -> tuple["Agent", ...]:
        """The agents whose runs its tools' calls are, and to which it hands runs over."""
        tools = (*self.tools, *self.earlier_tools)
        found = (one.agent for one in tools if isinstance(one, AgentTool | HandoffTool))
        return tuple(one for one in found if isinstance(one, Agent))

    def as_tool(
        self, name: str | None = None, description: str | None = None, input_type: Any = None
    ) -> AgentTool:
        """Return a tool for other agents: a call starts a run of this one, and is its answer.

        `name` is the agent's own by default. The arguments are one text, `input`, or the fields of
        the agent's `prompt`, or those of `input_type`, a type that pydantic knows or a JSON Schema.
        """
        return agent_tool(self, name, description, input_type)

    def as_handoff(self, name: str | None = None, description: str | None = None) -> HandoffTool:
        """Return a tool for other agents' `handoffs`: this agent goes on with the run.

        `name` is `transfer_to_NAME` by default, with the agent's own name.
        """
        return handoff_tool(self, name, description)

    def with_error_policy(self, policy: ErrorPolicy) -> "Agent":
        """Return a copy that follows `policy`."""
        return self._with(error_policy=policy)

    def with_cumulative_timeout(self, seconds: float) -> "Agent":
        """Return a copy whose steps may take `seconds` in all; replaces the wall-clock limit."""
        return self._with(cumulative_timeout=seconds)

    def _with(self, **overrides: Any) -> "Agent":
        changed = copy.copy(self)
        vars(changed)["config"] = self.config.with_overrides(overrides)
        check_reasoning(changed.config, changed.strategy)
        check_contract(changed.config, changed.special_tools)
        return changed


def reasoner_of(config: AgentConfig, agent: Agent) -> Reasoner | None:
    """Return the reasoner of runs of `config`: planning around answer contract and strategy.

    None for a plain agent. Raises `ConfigurationError` where the configuration names a part that
    the agent's code lacks.
    """
    contract = contract_of(config, agent.special_tools)
    return reasoning_of(config, agent.config, agent.strategy, contract)


def criteria_of(
    config: AgentConfig, agent: Agent | None = None, reasoner: Reasoner | None = None
) -> ContinuationCriteria:
    """Return the criteria of a run: the base set with the configured limits, then the agent's.

    The reasoner's criteria stand before the limits: a run that has answered with its last step
    has completed.
    """
    return base_criteria(
        max_steps=config.max_steps,
        token_limit=config.token_limit,
        time_limit=config.time_limit,
        cumulative_timeout=config.cumulative_timeout,
        budget_usd=config.budget_usd,
        error_policy=config.error_policy,
        finish_reasons=config.finish_reasons,
        resolver=agent.failures or resolve if agent else resolve,
        leading=reasoner.criteria() if reasoner else (),
        extra=agent.criteria if agent else (),
    )


def criteria_without_code(config: AgentConfig) -> ContinuationCriteria:
    """Return a run's criteria where the agent's code is not at hand.

    Its drivers are not known, so that limits hold as if work were left.
    """
    return ContinuationCriteria(criteria_of(config), WorkAssumed())


def _registry(agent: str, tools: Any, others: Sequence[Any]) -> ToolRegistry:
    """Return all tools of an agent. Raises `ConfigurationError` that names it and the field."""
    if not isinstance(tools, Iterable) or isinstance(tools, str):
        kind = with_article(type(tools).__name__)
        raise ConfigurationError(f"agent {agent!r}: field 'tools' is {kind}; write a list of tools")
    try:
        return registry_of([*tools, *others])
    except ConfigurationError as error:
        raise ConfigurationError(f"agent {agent!r}: field 'tools': {error.message}") from None


def _named(agent: str, models: Any) -> Any:
    """Return the name of a model, or a list of names. Raises `ConfigurationError`."""
    for one in () if isinstance(models, str) else models or [None]:
        if not isinstance(one, str) or not one:
            msg = (
                f"agent {agent!r}: field 'model': a list names models as 'provider:name'; "
                f"it has {one!r}"
            )
            raise ConfigurationError(msg)
    return models


def _schema(name: str, output_type: Any) -> dict[str, Any]:
    try:
        return schema_of(output_type).schema
    except ConfigurationError as error:
        msg = f"agent {name!r}: field 'output_type': {error.message}"
        raise ConfigurationError(msg) from None


def with_sub_agents(agents: Iterable[Agent]) -> dict[str, Agent]:
    """Return agents, and all whose runs they may start, or who may go on with theirs, by name.

    Raises `ConfigurationError` where two of them have one name.
    """
    found: dict[str, Agent] = {}
    left = list(agents)
    while left:
        agent = left.pop(0)
        known = found.setdefault(agent.name, agent)
        if known is agent:
            left += agent.sub_agents
        elif known.config != agent.config:
            msg = f"two agents are named {agent.name!r}, one in 'agents' or 'handoffs'; rename one"
            raise ConfigurationError(msg)
    return found
