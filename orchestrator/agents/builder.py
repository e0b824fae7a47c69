"""Builds an agent call by call, over its table in a file and the environment.

Decides precedence alone: code wins over the environment, the environment over the file, the file
over the defaults. Checks nothing itself: `build` does as `Agent` does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from stepfleet.orchestrator.agents.agent import Agent, layered, with_presets
from stepfleet.orchestrator.agents.strategies import Strategy
from stepfleet.orchestrator.continuation import CanDecideToContinue
from stepfleet.orchestrator.continuation.error_policy import ErrorPolicy
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.events.subscribers import BroadcastConfig, Subscribers
from stepfleet.orchestrator.memory.policy import MemoryPolicy
from stepfleet.orchestrator.models.caching import CachePolicy
from stepfleet.orchestrator.models.llm import LLM


@dataclass(frozen=True)
class AgentBuilder:
    """Builds an agent; every method returns a new builder and leaves this one unchanged.

    `with_fields` takes every argument of `Agent`; the other methods name the usual ones. Wrong
    values are refused by `build`. Times are seconds, costs US dollars.
    """

    name: str
    given: Mapping[str, Any] = field(default_factory=dict)

    def with_fields(self, **fields: Any) -> Self:
        """Set any arguments of `Agent`; tables such as `settings` are set field by field."""
        return type(self)(self.name, layered(self.given, fields))

    def with_model(self, model: str | Sequence[str] | LLM) -> Self:
        """Set the model: `provider:name`, a list of them, or an object with the `LLM` protocol."""
        return self.with_fields(model=model)

    def with_base_url(self, url: str, *, api_key_env: str | None = None) -> Self:
        """Set the model's address, and the variable that holds its key on workers."""
        key = {} if api_key_env is None else {"api_key_env": api_key_env}
        return self.with_settings(base_url=url, **key)

    def with_settings(self, **settings: Any) -> Self:
        """Set fields of `ModelSettings`, such as `temperature=0`."""
        return self.with_fields(settings=settings)

    def with_max_tokens(self, tokens: int | None) -> Self:
        """Limit one answer of the model."""
        return self.with_settings(max_tokens=tokens)

    def with_timeout(self, seconds: float) -> Self:
        """Limit one call of the model."""
        return self.with_settings(timeout=seconds)

    def with_system_prompt(self, text: str) -> Self:
        """Set the instructions."""
        return self.with_fields(instructions=text)

    def with_prompt(self, text: str | None) -> Self:
        """Set the text that words a row's fields as input, such as `Classify: {description}`."""
        return self._with_whole(prompt=text)

    def with_tools(self, *tools: Any) -> Self:
        """Add tools: functions with `@tool`, or references to such."""
        return self.with_fields(tools=(*self.given.get("tools", ()), *tools))

    def with_criteria(self, *criteria: CanDecideToContinue) -> Self:
        """Add criteria to the base set."""
        return self.with_fields(criteria=(*self.given.get("criteria", ()), *criteria))

    def with_max_iterations(self, steps: int) -> Self:
        """Limit the steps of an execution."""
        return self.with_fields(max_steps=steps)

    def with_token_limit(self, tokens: int | None) -> Self:
        """Limit the tokens of an execution; None for no limit (default 32,768)."""
        return self.with_fields(token_limit=tokens)

    def with_time_limit(self, seconds: float | None) -> Self:
        """Limit the time since an execution began; None for no limit (default 300)."""
        return self.with_fields(time_limit=seconds)

    def with_cumulative_timeout(self, seconds: float | None) -> Self:
        """Limit the time in steps, in place of the time since the beginning."""
        return self.with_fields(cumulative_timeout=seconds)

    def with_budget(self, usd: float | None) -> Self:
        """Limit the cost of an execution."""
        return self.with_fields(budget_usd=usd)

    def with_pricing(self, prices: Mapping[str, Any]) -> Self:
        """Set the prices of tokens, in USD per million: one price, or prices by model.

        As `{"input": 0.15, "output": 0.6}`, or `{"gpt-4o": {"input": 2.5, "output": 10}}`.
        """
        return self._with_whole(pricing=prices)

    def with_error_policy(self, policy: ErrorPolicy | str | Mapping[str, Any]) -> Self:
        """Set the error policy: a policy, or the name of a preset such as `retry_tool_errors`."""
        return self._with_whole(error_policy=policy)

    def with_memory(self, policy: MemoryPolicy | Mapping[str, Any]) -> Self:
        """Set how much of its conversation is sent to the model."""
        return self._with_whole(memory=policy)

    def with_cache(self, policy: CachePolicy | Mapping[str, Any] | bool = True) -> Self:
        """Share answers among all runs with equal requests; False switches that off."""
        return self._with_whole(cache=policy)

    def with_strategy(self, strategy: Strategy | str | None, **options: Any) -> Self:
        """Set the strategy; `options` are for a strategy that is given by name."""
        return self._with_whole(strategy=strategy, strategy_options=options)

    def with_output_type(self, output_type: Any, *, mode: str = "tool") -> Self:
        """Require an answer of that type or JSON Schema: by a `tool`, or `native` JSON."""
        return self._with_whole(output_type=output_type, answer_mode=mode)

    def without_output_type(self) -> Self:
        """Require no data any more: text is an answer again."""
        dropped = ("output_type", "output_schema", "answer_mode")
        kept = {name: value for name, value in self.given.items() if name not in dropped}
        return type(self)(self.name, kept)

    def with_events(self, events: BroadcastConfig | str | Mapping[str, Any] | Subscribers) -> Self:
        """Set the events that runs publish (or a preset's name), or subscribers on the worker."""
        if isinstance(events, Subscribers):
            return self.with_fields(subscribers=events)
        return self._with_whole(broadcast=events)

    def build(self) -> Agent:
        """Return the agent. Raises `ConfigurationError` that names the field and the fix."""
        fields = with_presets(self.name, self.given)
        if "model" not in fields:
            raise ConfigurationError(
                f"agent {self.name!r}: field 'model' is missing: with_model('provider:name'), or "
                'model = "provider:name" in its table'
            )
        return Agent(self.name, **fields)

    def _with_whole(self, **fields: Any) -> Self:
        """Set arguments, in place of all their earlier values."""
        return type(self)(self.name, {**self.given, **fields})
