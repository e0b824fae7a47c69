"""A run as a list shows it, and a page of such a list. Pure."""

from datetime import datetime

from pydantic import Field

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.outcome import ContinuationDecision, StopReason
from stepfleet.orchestrator.records.state import Lifecycle


class RunSummary(Record):
    """A run as a list shows it, without its conversation.

    `active_seconds` is the time of its current execution's steps; `cost_usd` is the run's own,
    `below_cost_usd` that of the runs below it. These and `tokens` are None where the run's state is
    too large to be read for a list. With `price_estimated` some of the cost is by the default
    price, with `usage_estimated` some of the tokens are estimates. `error` is cut.
    """

    run_id: str
    agent: str
    status: Lifecycle
    stop_reason: StopReason | None = None
    error: str | None = None
    batch_id: str | None = None
    line_id: str | None = None
    tenant: str | None = None
    parent: str | None = None
    created: datetime
    updated: datetime
    ended: datetime | None = None
    steps: int = 0
    max_steps: int | None = None
    lost_workers: int = 0
    active_seconds: float | None = None
    tokens: int | None = None
    cost_usd: float | None = None
    below_cost_usd: float | None = None
    price_estimated: bool = False
    usage_estimated: bool = False


class RunPage(Record):
    """A page of runs, the newest first. `next` is the cursor of the next page, None at the end.

    A page may have fewer runs than its limit, or none, and a `next`: `looked_at` runs
    were looked at, and more may match.
    """

    runs: tuple[RunSummary, ...] = Field(default=())
    next: str | None = None
    looked_at: int = 0


class RunTree(Record):
    """A run and the runs that its calls have started, in the order of these calls.

    `left_out` counts those left out of `below`, to keep the tree within its limit.
    """

    run: RunSummary
    below: tuple["RunTree", ...] = ()
    left_out: int = 0


class ToolSummary(Record):
    """A tool call as a timeline shows it. Texts are cut; None where contents are hidden.

    `run_id` is the run that the call has started, `decision` who has decided it, and when.
    """

    tool: str
    call_id: str
    is_error: bool = False
    duration_ms: float | None = None
    error: str | None = None
    arguments: str | None = None
    result: str | None = None
    run_id: str | None = None
    decision: str | None = None


class StepSummary(Record):
    """A committed step as a timeline shows it; its `text` is the model's.

    Texts are cut, and None where contents are hidden; `given` is what the run received before the
    step. `cached` is an answer of the response cache, `cached_tokens` are those that the provider
    had in its own. Of a step that is `too_large` for a timeline only the number is known. `cut`
    names the texts that are cut: 'given', 'text', 'errors:N', and 'arguments:N', 'result:N' and
    'error:N' of a tool call, with N from 0; of a step that is `too_large` it is 'step'. Where
    contents are hidden it is empty.
    """

    step: int
    too_large: bool = False
    type: str | None = None
    started_at: datetime | None = None
    duration_ms: float | None = None
    waited_seconds: float = 0.0
    waited_for: str = ""
    agent: str | None = None
    model: str | None = None
    worker: str | None = None
    finish_reason: str | None = None
    tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0
    price_estimated: bool = False
    usage_estimated: bool = False
    cached: bool = False
    errors: tuple[str, ...] = ()
    given: str | None = None
    text: str | None = None
    tool_calls: tuple[ToolSummary, ...] = ()
    cut: tuple[str, ...] = ()


class LostSummary(Record):
    """An attempt at a step that was not committed. `kind` is one of `LostKind`; `reason` is cut."""

    step: int
    kind: str
    at: datetime | None = None
    seconds: float = 0.0
    tokens: int = 0
    cost_usd: float | None = None
    reason: str | None = None


class Evaluated(Record):
    """What a criterion has decided on whether the run goes on, and why. Texts are cut.

    `numbers` are those that it has compared; `decisive` marks the criteria behind the outcome.
    """

    criterion: str
    decision: ContinuationDecision
    reason: str
    numbers: dict[str, str] = Field(default_factory=dict)
    decisive: bool = False


class RunTimeline(Record):
    """A run and a page of its steps. `next` is the first step of the next page, None at the end.

    `lost_attempts` is how many attempts at its steps were not committed, `lost` the newest ones,
    and `lost_cost_usd` what their calls have cost, or may have.
    `reason` says why it has stopped, or goes on, and `evaluations` what each criterion has decided
    after its last step. `waits_for` is what its next step waits for now; `before` are runs that
    have to end before its first one, with their statuses, `unknown` where one is not created yet.
    `given` is what it has received after its last step, and `given_cut` whether that is cut.
    `fleet_paused` is true where it has not ended and the whole fleet is paused. `content` is false
    where texts are hidden.
    """

    run: RunSummary
    reason: str = ""
    evaluations: tuple[Evaluated, ...] = ()
    steps: tuple[StepSummary, ...] = ()
    next: int | None = None
    lost_attempts: int = 0
    lost_cost_usd: float = 0.0
    lost: tuple[LostSummary, ...] = ()
    waits_for: str = ""
    before: dict[str, str] = Field(default_factory=dict)
    fleet_paused: bool = False
    given: str | None = None
    given_cut: bool = False
    content: bool = True
