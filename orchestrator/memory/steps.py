"""A run's memory as steps instead of messages: the system prompt and what each step added. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Self

from stepfleet.orchestrator.records.conversation.messages import Message
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
