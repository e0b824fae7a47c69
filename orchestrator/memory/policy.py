"""How much of its conversation an agent shows to its model: the storable part of memory.

Decides nothing by itself; `window` and `limits` apply it.
"""

from functools import cached_property
from typing import Self

from pydantic import Field, model_validator

from stepfleet.orchestrator.records.base import Record


class MemoryPolicy(Record):
    """Limits of what a request holds. None switches a rule off; without rules all is sent.

    `max_messages` counts messages; `max_tokens` tokens of the whole request's messages.
    `summarize_after` replaces what is left out by a summary as soon as there are more messages
    than that; it is made by `summary_model`, or else by the run's own. With `keep_system` the
    instructions stay whatever is left out, and do not count as messages. `custom` names a
    function as `module:attribute`, which sees the messages last and returns those to send.
    `context_tokens` is how much of a request the agent's `context` memory may fill. With
    `trim_log` the store forgets the steps that no request shows any more.
    """

    max_messages: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    summarize_after: int | None = Field(default=None, ge=2)
    keep_system: bool = True
    summary_model: str | None = Field(default=None, min_length=1)
    custom: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
    context_tokens: int = Field(default=1000, ge=1)
    trim_log: bool = False

    @model_validator(mode="after")
    def _rules_fit(self) -> Self:
        after, most = self.summarize_after, self.max_messages
        if after is not None and most is not None and after >= most:
            msg = (
                f"summarize_after ({after}) must be below max_messages ({most}), or the limit "
                "drops what was to be summarized"
            )
            raise ValueError(msg)
        return self

    @cached_property
    def active(self) -> bool:
        """Whether any rule is on."""
        rules = (self.max_messages, self.max_tokens, self.summarize_after, self.custom)
        return any(rule is not None for rule in rules) or not self.keep_system
