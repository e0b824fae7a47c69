"""The results of a memory policy: kept in the log with the step that made them."""

import operator

from pydantic import Field

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.usage import UsageStats


class Window(Record):
    """The part of its log that a run still shows to its model.

    `since` is the first step of the log that is shown (counted from 0); `task` the step before
    whose input is shown in front of it, where none is given at `since` itself; `summary` the step
    whose record holds the summary of what is left out. `limit` is a number of tokens, learned
    from the provider's refusal of a longer conversation. With `trimmed` the log before `since` is
    gone, and the window stays where another agent goes on with the run.
    """

    since: int = 0
    task: int | None = None
    summary: int | None = None
    limit: int | None = None
    trimmed: bool = False


class Summary(Record):
    """A summary in place of the older part of a conversation, with its call's usage and cost."""

    text: str
    model: str = ""
    service_tier: str = Field(default="", exclude_if=operator.not_)
    usage: UsageStats = UsageStats()
    usage_reported: bool = True
    cost_usd: float = 0.0


class Remembered(Record):
    """The result of one step's memory work: the new window, and a summary if one was made."""

    window: Window
    summary: Summary | None = None
