"""The part of a run's log that a request shows: a pure function of the log, moved in strides.

When a limit is exceeded the window's beginning moves on by a good part of the limit, and stays
there until the limit is exceeded again: between two moves each request begins as the one before
it did, as providers' prompt caches need. The beginning travels in the run's header,
so a claim reads the log from there on, and any worker comes to the same request.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from stepfleet.orchestrator.memory.conversation import summary_message
from stepfleet.orchestrator.memory.policy import MemoryPolicy
from stepfleet.orchestrator.memory.pruning import Count, estimate_tokens, limited
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.memory_window import Summary, Window
from stepfleet.orchestrator.records.steps import LoggedStep, StepResult


@dataclass(frozen=True, slots=True)
class StepMemory:
    """A system prompt and steps in their order. Changing methods return copies."""

    system_prompt: str = ""
    steps: tuple[LoggedStep, ...] = ()

    @classmethod
    def of(cls, system_prompt: str, steps: Iterable[LoggedStep]) -> Self:
        """Return the memory of a run: its agent's instructions and its log."""
        return cls(system_prompt, tuple(steps))

    def with_step(self, step: LoggedStep) -> Self:
        """Return a copy with `step` after the others."""
        return replace(self, steps=(*self.steps, step))

    def without_steps(self) -> Self:
        """Return a copy that holds the system prompt alone."""
        return replace(self, steps=())

    def filter(self, wanted: Callable[[StepResult], bool]) -> Self:
        """Return a copy with the steps that are `wanted`."""
        return replace(self, steps=tuple(one for one in self.steps if wanted(one.result)))

    def messages(self) -> tuple[Message, ...]:
        """Return the steps as messages after the system prompt."""
        system = (Message.system(self.system_prompt),) if self.system_prompt else ()
        return (*system, *(message for step in self.steps for message in step.messages))

    @property
    def last_step(self) -> StepResult | None:
        """The newest step; None before the first."""
        return self.steps[-1].result if self.steps else None

    def __len__(self) -> int:
        """Return how many steps there are."""
        return len(self.steps)


Messages = tuple[Message, ...]
_KEPT_IN_FOUR = 3
"""A limit that is exceeded leaves three quarters of itself."""


@dataclass(frozen=True, slots=True)
class Part:
    """The inputs before one step, and the messages that it added: calls with all their results."""

    given: Messages = ()
    added: Messages = ()

    @property
    def messages(self) -> Messages:
        """Both, in order."""
        return self.given + self.added


@dataclass(frozen=True, slots=True)
class History:
    """The part of a run's log that was read: one part per step from `first` to the open step.

    `earlier` holds inputs of steps before `first`, by step; `summary` stands for the rest.
    """

    parts: tuple[Part, ...]
    system: Messages = ()
    first: int = 0
    earlier: Mapping[int, Messages] = field(default_factory=dict)
    summary: Summary | None = None

    def since(self, step: int) -> tuple[Part, ...]:
        """Return the parts from `step` on."""
        return self.parts[step - self.first :]

    def between(self, start: int, end: int) -> Messages:
        """Return the messages of the steps from `start` to before `end`."""
        parts = self.parts[start - self.first : end - self.first]
        return tuple(message for part in parts for message in part.messages)

    def given(self, step: int) -> Messages:
        """Return the inputs before `step`, as far as they were read."""
        if step >= self.first:
            return self.parts[step - self.first].given
        return self.earlier.get(step, ())


def advance(
    window: Window, history: History, policy: MemoryPolicy, count: Count = estimate_tokens
) -> Window:
    """Return the window of the open step: moved on where a limit of the policy is exceeded.

    The message limits come first, then the tokens. The newest exchange always stays.
    """
    since = max(window.since, history.first)
    if (after := policy.summarize_after) is not None:
        since = _cut(history, window, since, (after, after // 2), _one)
    if (most := policy.max_messages) is not None:
        since = _cut(history, window, since, (most, _left_of(most)), _one)
    budget = token_budget(policy, window)
    if budget is not None:
        base = sum(map(count, history.system)) if policy.keep_system else 0
        if history.summary:
            base += count(summary_message(history.summary.text))
        room = max(budget - base, 1)
        since = _cut(history, window, since, (room, _left_of(room)), count)
    if since == window.since:
        return window
    return window.model_copy(update={"since": since, "task": _task(history, window, since)})


def shown(
    window: Window, history: History, policy: MemoryPolicy, count: Count = estimate_tokens
) -> Messages:
    """Return the messages of a request: instructions, summary, the task, and the window."""
    system = history.system if policy.keep_system or window.since == 0 else ()
    summary = (summary_message(history.summary.text),) if history.summary else ()
    task = _newest_question(history.given(window.task)) if window.task is not None else ()
    first, *others = history.since(window.since)
    given = _fitting(first.given, policy, window, count)
    rest = (message for part in others for message in part.messages)
    return (*system, *summary, *task, *given, *first.added, *rest)


def token_budget(policy: MemoryPolicy, window: Window) -> int | None:
    """Return the tokens that messages may take: the policy's limit or a learned, smaller one."""
    limits = [limit for limit in (policy.max_tokens, window.limit) if limit is not None]
    return min(limits, default=None)


def _cut(history: History, window: Window, since: int, limits: tuple[int, int], size: Count) -> int:
    """Return where the window begins under `limits`: the most, and what is left of it."""
    most, left = limits
    sizes = [sum(map(size, part.messages)) for part in history.since(since)]
    total = sum(sizes)
    if total + _size_of_task(history, window, since, size) <= most:
        return since
    newest = max((place for place, one in enumerate(sizes) if one), default=0)
    for one in sizes[:newest]:
        total -= one
        since += 1
        if total + _size_of_task(history, window, since, size) <= left:
            break
    return since


def _size_of_task(history: History, window: Window, since: int, size: Count) -> int:
    task = _task(history, window, since)
    return sum(map(size, _newest_question(history.given(task)))) if task is not None else 0


def _task(history: History, window: Window, since: int) -> int | None:
    """Return the newest step before `since` that was given a question, if `since` has none."""
    step = since
    while step >= history.first:
        if any(one.is_user() for one in history.given(step)):
            return step if step < since else None
        step -= 1
    return window.task if window.task is not None else 0


def _newest_question(given: Messages) -> Messages:
    for place in range(len(given) - 1, -1, -1):
        if given[place].is_user():
            return given[place:]
    return ()


def _fitting(given: Messages, policy: MemoryPolicy, window: Window, count: Count) -> Messages:
    """Return the newest of a long list that was given at once."""
    if len(given) < 2:  # noqa: PLR2004 - one message stays in any case
        return given
    limits = MemoryPolicy(
        max_messages=policy.max_messages, max_tokens=token_budget(policy, window), keep_system=False
    )
    return limited(given, limits, count)


def _left_of(limit: int) -> int:
    return max(limit * _KEPT_IN_FOUR // 4, 1)


def _one(_: Message) -> int:
    return 1
