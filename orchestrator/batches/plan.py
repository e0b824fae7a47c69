"""Which run each line of a batch becomes: its agent, its overrides. Does no I/O of its own.

Agents are given as configurations, or found by name through a function.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import orjson

from stepfleet.orchestrator.agents.config import AgentConfig, merged_overrides, stored_overrides
from stepfleet.orchestrator.batches.files.lines import (
    METADATA_LIMIT,
    BatchLine,
    LineFormat,
    RowRules,
    check_size,
    read_object,
)
from stepfleet.orchestrator.batches.files.openai_format import parse_openai_line, plain_config
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models.support import check_messages
from stepfleet.orchestrator.records import exact_json

REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class Draft:
    """A line that is valid: what its run starts with. `before`: the rows of its `after`."""

    line: BatchLine
    config: AgentConfig
    digest: str
    overrides: dict[str, Any]
    max_steps: int
    before: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Base:
    """An agent with the overrides that hold for the whole batch."""

    config: AgentConfig
    digest: str
    overrides: dict[str, Any]
    changed: AgentConfig


class Plan:
    """Turns lines into drafts.

    `default` names the agent of lines that name none. `given` are agents by name; others are
    looked up by `named`, which raises `ConfigurationError` for those it does not know.
    `overrides` hold for every line; a line's own win. `rules` say what a line is.
    """

    def __init__(
        self,
        default: str | None,
        given: Mapping[str, AgentConfig],
        named: Callable[[str], AgentConfig],
        overrides: Mapping[str, Any],
        rules: RowRules = RowRules(),  # noqa: B008 - frozen
    ) -> None:
        self.format: LineFormat | None = None
        self.rules = rules
        self._default = default or (next(iter(given)) if len(given) == 1 else None)
        self._given = given
        self._named = named
        self._overrides = overrides
        self._bases: dict[str, _Base | ConfigurationError] = {}
        self._plains: dict[bytes, _Base] = {}
        self._known: dict[tuple[str, bytes], tuple[dict[str, Any], int]] = {}
        if self._default is not None:
            self._base(self._default)

    @property
    def configs(self) -> list[AgentConfig]:
        """The configurations that lines have used so far."""
        return [base.config for base in self._used]

    @property
    def signature(self) -> bytes:
        """What besides the lines decides what their runs do: agents and overrides."""
        parts = sorted(([base.digest, base.overrides] for base in self._used), key=itemgetter(0))
        whole = [self._default, parts, *self.rules.signature]
        return exact_json.dumps(whole, option=orjson.OPT_SORT_KEYS)

    @property
    def _used(self) -> list[_Base]:
        found = [base for base in self._bases.values() if isinstance(base, _Base)]
        return [*found, *self._plains.values()]

    def draft(self, raw: bytes) -> Draft:
        """Return what becomes of a line. Raises `ConfigurationError` that names field and fix."""
        data = read_object(raw)
        kind = self.rules.format_of(data)
        if self.format is None:
            self.format = kind
        if kind != self.format:
            msg = f"has the format {kind}, and earlier lines {self.format}; use one per file"
            raise ConfigurationError(msg)
        if kind == "openai":
            line = parse_openai_line(data)
            base = self._base_of(line)
        else:
            base = self._base(self._name_of(self.rules.agent_of(data)))
            line = self.rules.line_of(data, base.config.prompt)
        if self.rules.tenant and line.tenant is None:
            line = replace(line, tenant=self.rules.tenant)
        overrides, max_steps = self._decide(base, line.overrides)
        name = "input" if kind == "stepfleet" else "body.messages"
        check_messages(_models(base.config, overrides), line.messages, name)
        return Draft(line, base.config, base.digest, overrides, max_steps)

    def _base_of(self, line: BatchLine) -> _Base:
        if self._default is None and line.model is not None:
            return self._plain(line, line.model)
        base = self._base(self._name_of(None))
        _check_request(line, base.config)
        return base

    def _name_of(self, named: str | None) -> str:
        if (name := named or self._default) is not None:
            return name
        known = ", ".join(sorted(self._given))
        choice = f"one of {known}" if known else "an agent"
        msg = (
            f"field 'agent' is missing; name {choice} there, or for the whole batch with agent=..."
        )
        raise ConfigurationError(msg)

    def _base(self, name: str) -> _Base:
        if name not in self._bases:
            try:
                config = self._given.get(name) or self._named(name)
                self._bases[name] = self._made(config)
            except ConfigurationError as error:
                if name == self._default:
                    raise
                self._bases[name] = error
        base = self._bases[name]
        if isinstance(base, ConfigurationError):
            raise ConfigurationError(base.message)
        return base

    def _plain(self, line: BatchLine, model: str) -> _Base:
        """Return the agent of a request line: one per model and further fields of the body."""
        key = exact_json.dumps([model, line.extra_body], option=orjson.OPT_SORT_KEYS)
        if key not in self._plains:
            if len(self._plains) >= REMEMBERED:
                msg = (
                    f"is the {REMEMBERED + 1:,}th with other fields in 'body' (not messages and "
                    "sampling); leave out those that differ by line, like 'user', or split the file"
                )
                raise ConfigurationError(msg)
            config = plain_config(model, line.extra_body)
            check_size(len(key), METADATA_LIMIT, "body")
            if line.tools:
                msg = (
                    "field 'body.tools': tools run here as an agent's code; submit with an agent "
                    "that has them (agent=...), or leave them out"
                )
                raise ConfigurationError(msg)
            self._plains[key] = self._made(config)
        return self._plains[key]

    def _made(self, config: AgentConfig) -> _Base:
        overrides = stored_overrides(config, self._overrides)
        return _Base(config, config.digest, overrides, config.with_overrides(overrides))

    def _decide(self, base: _Base, wanted: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Return the run's overrides in stored form and its step limit."""
        if not wanted:
            return base.overrides, base.changed.max_steps
        key = (base.digest, exact_json.dumps(wanted, option=orjson.OPT_SORT_KEYS))
        if key not in self._known:
            own = stored_overrides(base.changed, wanted)
            changed = base.changed.with_overrides(own)
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[key] = (merged_overrides(base.overrides, own), changed.max_steps)
        return self._known[key]


def _models(config: AgentConfig, overrides: Mapping[str, Any]) -> tuple[str, ...]:
    if "model" not in overrides:
        return config.models
    return (overrides["model"], *overrides.get("fallbacks", ()))


def _check_request(line: BatchLine, config: AgentConfig) -> None:
    """Raise `ConfigurationError` where an agent cannot serve an OpenAI line."""
    names = [tool.name for tool in config.tools]
    missing = [name for name in line.tools if name not in names]
    if missing and not config.mcp_servers:
        msg = (
            f"field 'body.tools': agent {config.name!r} has no tool {missing[0]!r}; "
            "give it that tool, or leave it out of the line"
        )
        raise ConfigurationError(msg)
    if line.extra_body:
        name = next(iter(line.extra_body))
        msg = (
            f"field 'body.{name}' cannot be set per line for agent {config.name!r}; put it into "
            "the agent's settings.extra_body, or leave it out"
        )
        raise ConfigurationError(msg)
