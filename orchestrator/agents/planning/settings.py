"""When a run plans: stored with its agent's configuration."""

from typing import Self

from pydantic import Field, model_validator

from stepfleet.orchestrator.records.base import Record


class Planning(Record):
    """Planning turns of a run: `at_start` of each execution, and after `every` k other steps.

    `every` 0 plans at the start alone. With `tracked` the model is offered the tool
    `update_plan`, which sets the state of a step of the plan.
    """

    at_start: bool = True
    every: int = Field(default=0, ge=0, le=1000)
    tracked: bool = False

    @model_validator(mode="after")
    def _plans_at_all(self) -> Self:
        if not self.at_start and not self.every:
            raise ValueError("it never plans: set at_start=True, or every to a number of steps")
        return self
