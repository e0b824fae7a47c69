"""What a model call is expected to take, and what is charged for it. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stepfleet.orchestrator.limits.budgets import Spending
from stepfleet.orchestrator.limits.limit import kind_of
from stepfleet.orchestrator.records.usage import UsageStats

FIRST_OUTPUT = 256
"""Output tokens of the first call of an agent of which nothing is known."""
MOST_FIRST_OUTPUT = 4096
"""So many a call may have, as far as budgets know, until enough of its agent's calls have ended."""
ENOUGH = 8
QUANTILE, PACE = 0.75, 0.1
MOST_AGENTS = 10_000
_COUNTS_MAX_TOKENS = frozenset({"openai", "openai-responses", "azure"})
"""Services that charge a rate with `max_tokens` of a request, whatever it then takes."""
_CACHED_IS_FREE = frozenset({"anthropic"})
"""Services whose rates leave out what was read from the prompt cache."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """What a call takes of its limits: requests, tokens, and first steps of runs.

    `spending` is for budgets, `most` what the call may spend where its agent is little known, and
    `before` what a run that has its own has spent before the call.
    """

    requests: int = 1
    input_tokens: int = 0
    output_tokens: int = 0
    starts: int = 0
    spending: Spending | None = None
    most: Spending | None = None
    before: Spending | None = None

    def stored(self) -> dict[str, Any]:
        """Return the amounts as the script reads them."""
        given = (self.requests, self.input_tokens, self.output_tokens, self.starts)
        stored: dict[str, Any] = dict(zip("rios", given, strict=True))
        if self.spending is not None:
            stored |= self.spending.stored()
        if self.most is not None:
            stored["m"] = {"u": self.most.nano, "k": self.most.tokens}
        return stored if self.before is None else stored | {"own": self.before.stored()}


class AgentEstimates:
    """Learns a number of the calls of each agent, as their output tokens: about its upper quartile.

    `first` is expected of an agent of which nothing is known.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._known: dict[str, float] = {}
        self._calls: dict[str, int] = {}

    def learn(self, agent: str, number: int) -> None:
        """Note the number of a call."""
        known = self._known.get(agent)
        self._calls[agent] = self._calls.get(agent, 0) + 1
        if known is None:
            if len(self._known) >= MOST_AGENTS:
                self._known.clear()
                self._calls = {agent: 1}
            self._known[agent] = float(number)
            return
        step = PACE * max(known, number, 1.0)
        self._known[agent] = max(
            0.0, known + (step * QUANTILE if number > known else -step * (1 - QUANTILE))
        )

    def knows(self, agent: str) -> bool:
        """Return whether enough of the agent's calls are known."""
        return self._calls.get(agent, 0) >= ENOUGH

    def of(self, agent: str) -> int:
        """Return the number that is expected of the agent's next call."""
        return round(self._known.get(agent, self._first))


def reserved(
    model: str, *, prompt: int, output: int, most: int | None, cached: int = 0, first: bool = False
) -> Amounts:
    """Return what a call reserves.

    `prompt` and `output` are the expected tokens, `most` is the call's `max_tokens`; `cached` of
    the prompt are expected in the provider's cache. `first`: it is the first step of a run.
    """
    if kind_of(model) in _COUNTS_MAX_TOKENS and most is not None:
        output = most
    elif most is not None:
        output = min(output, most)
    if kind_of(model) in _CACHED_IS_FREE:
        prompt -= min(cached, prompt)
    return Amounts(1, prompt, output, int(first))


def charged(model: str, usage: UsageStats, *, most: int | None, first: bool = False) -> Amounts:
    """Return what a step has taken, by its usage. An answer from our own cache takes nothing."""
    calls = usage.llm_calls
    prompt, output = usage.prompt_tokens, usage.completion_tokens
    if calls and kind_of(model) in _COUNTS_MAX_TOKENS and most is not None:
        output = max(output, most * calls)
    if kind_of(model) in _CACHED_IS_FREE:
        prompt = max(prompt - usage.cached_tokens, 0)
    return Amounts(calls, prompt, output, int(first))


def total(parts: Iterable[int]) -> int:
    """Return the sum of tokens, within what the script counts exactly."""
    return min(sum(parts), 10**12)
