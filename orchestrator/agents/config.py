"""The storable configuration of an agent, which a run keeps for as long as it lives."""

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, Self, TypedDict

from pydantic import Field, ValidationError, field_validator, model_validator

from stepfleet.orchestrator.agents.planning import Planning
from stepfleet.orchestrator.agents.prompt import Prompt
from stepfleet.orchestrator.agents.strategies.built_in import json_strategy
from stepfleet.orchestrator.agents.strategies.strategy import Template
from stepfleet.orchestrator.continuation.error_policy import ErrorPolicy
from stepfleet.orchestrator.errors import ConfigurationError, SerializationError
from stepfleet.orchestrator.events.subscribers import BroadcastConfig
from stepfleet.orchestrator.memory.policy import MemoryPolicy
from stepfleet.orchestrator.models.caching import CachePolicy
from stepfleet.orchestrator.models.pricing.loading import Pricing
from stepfleet.orchestrator.models.services import problem_of_list, problem_with
from stepfleet.orchestrator.models.support import support_of
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.answers import SubAgentLimits
from stepfleet.orchestrator.records.responses import ModelSettings
from stepfleet.orchestrator.records.run.trace import ANSWER_TOOLS
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.text.validation import explain_invalid, meant
from stepfleet.orchestrator.tools.schemas.bounded_json import (
    READABLE_LEVELS,
    check_nesting,
    is_too_deep,
)
from stepfleet.orchestrator.tools.schemas.handles import handle_of

Fields = Mapping[str, Any]
"""A record by its fields."""


class _ForBoth(TypedDict, total=False):
    fallbacks: Iterable[str]
    instructions: str
    max_steps: int
    token_limit: int | None
    time_limit: float | None
    cumulative_timeout: float | None
    budget_usd: float | None
    error_policy: ErrorPolicy | Fields
    finish_reasons: Iterable[str]
    parallel_tool_execution: bool
    tool_choice: str
    parallel_tool_calls: bool | None
    model_attempts: int
    allow_empty_answer: bool
    settings: ModelSettings | Fields
    memory: MemoryPolicy | Fields
    cache: CachePolicy | Fields | bool | None
    user_template: str | None
    planning: Planning | Fields | None
    broadcast: BroadcastConfig | Fields | Literal["minimal", "standard", "debug"]
    require_final_answer: bool
    output_schema: dict[str, Any] | None
    answer_mode: Literal["tool", "native"]
    sub_agent_limits: SubAgentLimits | Fields


class RunOverrides(_ForBoth, total=False):
    """Changes of one run to its agent's configuration."""

    model: str | Sequence[str]


class AgentKeywords(_ForBoth, total=False):
    """Arguments of `Agent` besides its own."""

    prompt: str | None
    strategy_options: Mapping[str, Any]
    pricing: Mapping[str, Any]
    metadata: Mapping[str, Any]


_SWITCH: Mapping[Any, Any] = {True: {}, False: None, "true": {}, "false": None}
LARGEST = 2**53
"""Of a limit: what every part of the system counts exactly."""
NOT_PER_RUN = (
    "name",
    "prompt",
    "tools",
    "mcp_servers",
    "special_tools",
    "settings.base_url",
    "settings.api_key_env",
    "settings.organization",
    "settings.extra_body",
    "strategy",
    "strategy_options",
    "memory.custom",
    "pricing",
)


class ToolRef(Record):
    """A tool by name and version, as a run's configuration remembers it."""

    name: str
    version: str = "1"


class AgentConfig(Record):
    """The storable part of an agent.

    `model` may be given as a list: the first one is called, and the others, the `fallbacks`, in
    its place where it is out or too small for the conversation.
    `time_limit` and `cumulative_timeout` are seconds (the second replaces the first),
    `token_limit` tokens, `budget_usd` US dollars, each per execution; None switches a limit
    off. `prompt` words a row of fields as the input. `model_attempts` bounds how often one step's
    model call is tried. An answer without text and calls is a failed call, unless
    `allow_empty_answer` is set. `mcp_servers` names the servers whose tools workers add. `pricing`
    holds prices in USD per million tokens, by model or one for all, which win over the workers'
    own. With a `cache` policy equal requests of all runs share their answers; True stands for its
    defaults.

    With `require_final_answer` or an `output_schema` (a JSON Schema, named by its title) a run
    ends only when the model gives its answer: by a tool, or in `native` mode as a message that
    the provider writes as JSON of that schema.
    """

    name: str = Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][\w.\- ]*$")
    model: str = Field(min_length=1)
    fallbacks: tuple[str, ...] = ()
    instructions: str = ""
    prompt: Prompt | None = None
    tools: tuple[ToolRef, ...] = ()
    mcp_servers: tuple[ToolRef, ...] = ()
    max_steps: int = Field(default=10, ge=1, le=LARGEST)
    token_limit: int | None = Field(default=32_768, ge=1, le=LARGEST)
    time_limit: float | None = Field(default=300.0, gt=0, le=LARGEST)
    cumulative_timeout: float | None = Field(default=None, gt=0, le=LARGEST)
    budget_usd: float | None = Field(default=None, gt=0, le=LARGEST)
    error_policy: ErrorPolicy = ErrorPolicy()
    finish_reasons: tuple[FinishReason, ...] = ()
    parallel_tool_execution: bool = False
    tool_choice: str = "auto"
    parallel_tool_calls: bool | None = None
    model_attempts: int = Field(default=5, ge=1, le=100)
    allow_empty_answer: bool = Field(default=False, exclude_if=operator.not_)
    settings: ModelSettings = ModelSettings()
    memory: MemoryPolicy = MemoryPolicy()
    cache: CachePolicy | None = None
    user_template: Template | None = None
    strategy: str | None = Field(default=None, min_length=1)
    strategy_options: dict[str, Any] = Field(default_factory=dict)
    planning: Planning | None = None
    broadcast: BroadcastConfig = BroadcastConfig()
    require_final_answer: bool = False
    output_schema: dict[str, Any] | None = None
    answer_mode: Literal["tool", "native"] = "tool"
    special_tools: tuple[str, ...] = ()
    sub_agent_limits: SubAgentLimits = SubAgentLimits()
    pricing: Pricing = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _listed(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and isinstance(given.get("model"), list | tuple):
            first, *others = given["model"] or [""]
            if given.get("fallbacks"):
                raise ValueError("'model' is a list already; leave 'fallbacks' out")
            return {**given, "model": first, "fallbacks": others}
        return given

    @field_validator("cache", mode="before")
    @classmethod
    def _switched(cls, given: Any) -> Any:
        return _SWITCH.get(given, given) if isinstance(given, bool | str) else given

    @field_validator("output_schema")
    @classmethod
    def _usable(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is None:
            return None
        try:
            return handle_of(schema).schema
        except ConfigurationError as error:
            raise ValueError(error.message) from None

    @property
    def models(self) -> tuple[str, ...]:
        """The model and its fallbacks, in the order of their calls."""
        return (self.model, *self.fallbacks)

    @property
    def by_model(self) -> tuple[Self, ...]:
        """The configuration with each of its models alone."""
        if not self.fallbacks:
            return (self,)
        each = ({"model": one, "fallbacks": ()} for one in self.models)
        return tuple(self.model_copy(update=one) for one in each)

    @property
    def demands_answer(self) -> bool:
        """Whether only an answer by its contract ends a run."""
        return self.require_final_answer or self.output_schema is not None

    @property
    def answers_natively(self) -> bool:
        """Whether the provider writes the answer as JSON of the schema.

        In `native` mode, unless there are tools and a model's service cannot do it with them:
        then the answer is given by a tool.
        """
        if self.answer_mode != "native":
            return False
        if not (self.tools or self.special_tools or self.mcp_servers or self.planning):
            return True
        return all(one is None or one.data_beside_tools for one in map(support_of, self.models))

    def check_answer(self) -> None:
        """Raise `ConfigurationError`, with the fix, where the answer contract cannot be kept."""
        names = [*(tool.name for tool in self.tools), *self.special_tools]
        if self.demands_answer:
            names += sorted(ANSWER_TOOLS)
        if len(names) > len(set(names)):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigurationError(
                f"agent {self.name!r}: tool {twice!r} appears twice, or is the answer contract's "
                "own; give one of them another name"
            )
        if self.answer_mode == "native" and self.output_schema is None:
            raise ConfigurationError(
                f"agent {self.name!r}: answer_mode 'native' needs an output_type: the schema of "
                "the provider's JSON"
            )

    def check_tool_choice(self, json_strategy: str | None = None) -> None:
        """Raise `ConfigurationError`, with the fix, where no run can follow the `tool_choice`.

        The one rule for agents, overrides, batch lines and forks. `json_strategy` names the
        strategy whose JSON mode sends no native tools.
        """
        choice = self.tool_choice
        names = [*(tool.name for tool in self.tools), *self.special_tools]
        wrong = ""
        # Only workers know the tools of MCP servers.
        if choice not in {"auto", "any", "none", *names} and not self.mcp_servers:
            wrong = f"is neither auto, any, none nor one of its tools ({', '.join(names)})"
        elif choice != "auto" and json_strategy is not None:
            wrong = (
                f"needs native tool calls, and strategy {json_strategy} is in JSON mode; "
                "use strategy_options={'mode': 'text'} or tool_choice 'auto'"
            )
        elif choice == "none" and (
            self.special_tools or (self.demands_answer and not self.answers_natively)
        ):
            wrong = (
                "keeps the model from giving its answer by a tool; set 'auto' or 'any', or "
                "answer_mode='native' with an output_type"
            )
        if wrong:
            msg = f"agent {self.name!r}: field 'tool_choice': {choice!r} {wrong}"
            raise ConfigurationError(msg)

    def check_storable(self) -> None:
        """Raise `ConfigurationError` that names the field with a value that JSON does not have."""
        try:
            self.to_json()
        except ValueError as error:
            wrong = next(filter(self._is_unstorable, type(self).model_fields), "?")
            msg = (
                f"agent {self.name!r}: field {wrong!r} is stored, so it must be JSON data ({error})"
            )
            raise ConfigurationError(msg) from None

    def _is_unstorable(self, field: str) -> bool:
        try:
            self.model_dump_json(include={field})
        except ValueError:
            return True
        return False

    def check_models(self) -> None:
        """Raise `ConfigurationError`, with the fix, where a model cannot be called like this."""
        settings = self.settings.model_dump(exclude_defaults=True)
        summary = {"base_url": self.settings.base_url}
        if problem := problem_of_list(self.models, settings):
            raise ConfigurationError(f"agent {self.name!r}: field 'model': {problem}")
        for field, model, given in (
            *(("model", one, settings) for one in self.models),
            ("summary_model", self.memory.summary_model, summary),
        ):
            problem = problem_with(model, given) if model is not None else None
            if problem is not None:
                raise ConfigurationError(f"agent {self.name!r}: field {field!r}: {problem}")
        for model in self.models if self.parallel_tool_calls is False else ():
            support = support_of(model)
            if support and not support.parallel_switch:
                raise ConfigurationError(
                    f"agent {self.name!r}: field 'parallel_tool_calls': {model!r} cannot switch "
                    "parallel calls off; leave the field out, or use another model"
                )

    @property
    def digest(self) -> str:
        """The configuration's content address (hex)."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    def with_overrides(self, overrides: Mapping[str, Any]) -> Self:
        """Return the configuration with some fields changed; `settings` field by field.

        Raises `ConfigurationError` that names the field when one is unknown or invalid, or may
        not be set per run: a submitter of lines must not choose where keys are sent.
        """
        if not overrides:
            return self
        merged = {**self.settings.model_dump(), **overrides.get("settings", {})}
        own = self.model_dump()
        if "model" in overrides:
            own["fallbacks"] = ()
        try:
            changed = type(self).model_validate({**own, **overrides, "settings": merged})
        except ValidationError as error:
            raise ConfigurationError(explain_invalid(error, record=type(self))) from None
        for name in NOT_PER_RUN:
            if attrgetter(name)(changed) != attrgetter(name)(self):
                msg = f"field {name!r} cannot be overridden per run; define another agent for that"
                raise ConfigurationError(msg)
        changed.check_answer()
        changed.check_tool_choice()
        return changed


_IN_PARTS = "settings"
_OF_MODELS = frozenset({"model", "fallbacks", "memory", "settings", "parallel_tool_calls"})

_OF_RUNS = frozenset(
    {"max_steps", "token_limit", "time_limit", "cumulative_timeout", "budget_usd", "error_policy"}
) | {"broadcast"}


def limits_of(config: AgentConfig, unlike: AgentConfig | None = None) -> dict[str, Any]:
    """Return the fields that stay a run's own where another agent goes on with it, as stored.

    Those alone that differ in `unlike`, if that is given.
    """
    names = {
        name
        for name in _OF_RUNS
        if unlike is None or getattr(config, name) != getattr(unlike, name)
    }
    return config.model_dump(mode="json", include=names)


def stored_overrides(config: AgentConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` as JSON data that `config.with_overrides` takes.

    Raises `ConfigurationError` that names the field when one is unknown or invalid.
    """
    if not given:
        return {}
    for name, value in given.items():
        check_nesting(value, name)
    wanted = {name: _whole(config, name, value) for name, value in given.items()}
    changed = config.with_overrides(wanted)
    changed.check_storable()
    if not _OF_MODELS.isdisjoint(given):
        changed.check_models()
    if "tool_choice" in given:
        changed.check_tool_choice(json_strategy(config.strategy, config.strategy_options))
    # A run's own model is called without the fallbacks of its agent.
    stored = {*given, "fallbacks"} if "model" in given and changed.fallbacks else set(given)
    plain = changed.model_dump(mode="json", include=stored)
    if _IN_PARTS in plain:
        plain[_IN_PARTS] = {name: plain[_IN_PARTS][name] for name in wanted[_IN_PARTS]}
    return plain


_NAMES = frozenset(RunOverrides.__annotations__) | {"metadata"}


def named_overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides whose names come from outside, as keywords of a call.

    Raises `ConfigurationError` for a name that is none: it might be another keyword of that call.
    """
    for name in given:
        if name in _NAMES:
            continue
        if name in AgentConfig.model_fields:
            msg = f"field {name!r} cannot be overridden per run; define another agent for that"
        else:
            msg = (
                f"field {ascii(name)[:60]} is not known{meant(name, _NAMES)}; write fields of the "
                "agent's configuration, such as max_steps"
            )
        raise ConfigurationError(msg)
    return dict(given)


def with_stored_overrides(config: AgentConfig, stored: str | None) -> AgentConfig:
    """Return an agent's configuration with the overrides that a run's header holds.

    Raises `SerializationError` as `read_overrides` does.
    """
    return config.with_overrides(read_overrides(stored)) if stored else config


def read_overrides(stored: str | None) -> dict[str, Any]:
    """Return the overrides that a run's header holds.

    Raises `SerializationError` for other data than a version of ours has stored.
    """
    if not stored:
        return {}
    try:
        found = exact_json.loads(stored)
    except ValueError as error:
        raise SerializationError(f"the run's overrides cannot be read: {error}") from None
    if not isinstance(found, dict) or is_too_deep(found, READABLE_LEVELS):
        raise SerializationError(
            "the run's overrides cannot be read: not an object, or nested too deep"
        )
    return found


def merged_overrides(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored overrides in which `second` wins, field by field of the settings too."""
    if "model" in second:
        first = {name: value for name, value in first.items() if name != "fallbacks"}
    merged = {**first, **second}
    if _IN_PARTS in first and _IN_PARTS in second:
        merged[_IN_PARTS] = {**first[_IN_PARTS], **second[_IN_PARTS]}
    return merged


def _whole(config: AgentConfig, name: str, value: Any) -> Any:
    """Return a value in the form that the configuration takes."""
    if name == _IN_PARTS:
        if isinstance(value, Record):
            return value.model_dump(exclude_unset=True)
        if not isinstance(value, Mapping):
            raise ConfigurationError(f"field {name!r} must be an object; write its fields")
        return dict(value)
    current = getattr(config, name, None)
    if isinstance(current, Record) and isinstance(value, Mapping):
        return {**current.model_dump(), **value}
    return value
