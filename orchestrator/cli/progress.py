"""Shows a batch's progress on standard error: live on a terminal, else a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.batches.failures import FailureCount, FailureGroup, failure_of
from stepfleet.orchestrator.cli.terminal import count, notice, screen, seconds, shown, usd
from stepfleet.orchestrator.records.batch import BatchProgress
from stepfleet.orchestrator.records.calls.answers import AskCount
from stepfleet.orchestrator.records.run.results import AgentRunResult

LIVE_SECONDS = 0.5
PLAIN_SECONDS = 5.0
_BAR_WIDTH = 40
_CAUSE = 160
TOP = 3
"""Causes that are shown with the progress and the outcome of a batch."""
WINDOW_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Runs ended and steps committed at a time (seconds of any steady clock)."""

    at: float
    done: int
    steps: int


@dataclass(frozen=True, slots=True)
class BatchPace:
    """The samples of the last `WINDOW_SECONDS`."""

    samples: tuple[Sample, ...] = ()

    def with_sample(self, sample: Sample) -> "BatchPace":
        """Return the pace with a newer sample and without outdated ones."""
        kept = [one for one in self.samples if one.at >= sample.at - WINDOW_SECONDS]
        return BatchPace((*kept, sample))

    @property
    def steps_per_second(self) -> float:
        """Steps per second over the window; 0 until it is known."""
        return self._rate("steps")

    def eta_seconds(self, still_open: int) -> float | None:
        """Return the seconds until `still_open` more runs have ended, or None if unknown."""
        if still_open <= 0:
            return 0.0
        rate = self._rate("done")
        return still_open / rate if rate > 0 else None

    def _rate(self, field: str) -> float:
        if len(self.samples) < 2:  # noqa: PLR2004 - a rate needs two points
            return 0.0
        first, last = self.samples[0], self.samples[-1]
        span = last.at - first.at
        growth: int = getattr(last, field) - getattr(first, field)
        return max(0.0, growth / span) if span > 0 else 0.0


class Display:
    """A batch's progress over time; `update` limits how often it is shown.

    `advice` makes what a user here can do out of the reason for a standstill.
    """

    def __init__(
        self,
        *,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        advice: Callable[[str], str] = str,
    ) -> None:
        self._clock = clock
        self._advice = advice
        self._started = clock()
        self._seen = FailureCount()
        self._pace = BatchPace()
        self._approvals = AskCount()
        self._shown_at = float("-inf")
        self._reason = ""
        wanted = sys.stderr.isatty() if live is None else live
        console = screen(stderr=True)
        self._live = Live(console=console, auto_refresh=False, transient=True) if wanted else None

    def update(self, progress: BatchProgress, *, last: bool = False) -> None:
        """Show the newest progress, at once where it is the `last`."""
        now = self._clock()
        self._pace = self._pace.with_sample(Sample(now, progress.done, progress.steps))
        if self._live:
            shown = picture(
                progress,
                self._pace,
                now - self._started,
                self._causes(progress),
                self._approvals,
            )
            if self._reason:
                shown = Group(shown, Text(self._reason, style="yellow"))
            self._live.update(shown, refresh=True)
        elif last or now - self._shown_at >= PLAIN_SECONDS:
            self._shown_at = now
            reason = f" ({self._reason})" if self._reason and not last else ""
            notice(progress_line(progress, self._pace, self._approvals) + reason)

    def count_approvals(self, approvals: AskCount) -> None:
        """Note how many calls of the batch wait for people."""
        self._approvals = approvals

    def stands_still(self, reason: str, what: str = "Nothing moves") -> None:
        """Show why nothing moves below the progress; an empty text when it moves again.

        `what` names it where something else waits.
        """
        was, self._reason = self._reason, self._advice(reason)
        if reason and not self._live and self._reason != was:
            notice(f"{what}: {self._reason}")

    @property
    def is_live(self) -> bool:
        """Whether the progress is shown anew at each change, on a terminal."""
        return self._live is not None

    def count(self, result: AgentRunResult) -> None:
        """Count a result by its cause, if it did not complete; counted anew after a retry."""
        if failure := failure_of(result):
            self._seen.add(failure)

    def _causes(self, progress: BatchProgress) -> Sequence[FailureGroup]:
        return self._seen.failures(progress.batch_id, 0).groups[:TOP]

    def notice(self, text: str) -> None:
        """Print a notice above the progress."""
        if self._live:
            self._live.console.print(Text(text))
        else:
            notice(text)

    def leave(self) -> None:
        """Restore the terminal before the process ends at once."""
        if self._live:
            self._live.console.show_cursor()

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()


def picture(
    progress: BatchProgress,
    pace: BatchPace,
    elapsed: float,
    causes: Sequence[FailureGroup] = (),
    approvals: AskCount = AskCount(),
) -> RenderableType:
    """Return a running batch as a terminal shows it, with its top causes so far. Pure."""
    head = Table.grid(padding=(0, 1))
    head.add_row(
        Text(shown(progress.agent or "batch", 30), style="bold"),
        ProgressBar(total=max(1, progress.total), completed=progress.done, width=_BAR_WIDTH),
        f"{count(progress.done)}/{count(progress.total)}",
        f"{seconds(elapsed)}, ETA {seconds(_eta(progress, pace, approvals))}",
    )
    states = Text()
    for label, value, style in (
        ("completed", progress.completed, "green"),
        ("failed", progress.failed, "red"),
        ("stopped", progress.stopped, "yellow"),
        ("cancelled", progress.cancelled, "yellow"),
        ("in progress", progress.in_progress, "cyan"),
        ("queued", progress.queued, ""),
        ("paused", progress.paused, "magenta"),
    ):
        if value or label in {"completed", "in progress", "queued"}:
            states.append(f"{count(value)} {label}  ", style=style)
    spent = Text(
        f"{count(progress.steps)} steps ({pace.steps_per_second:.1f}/s)  "
        f"{count(progress.tokens)} tokens  "
        f"{usd(progress.cost_usd, guessed=progress.default_priced_usd > 0)}",
        style="dim",
    )
    held = [Text(f"held: {shown(str(progress.held))}", style="red")] if progress.held else []
    return Group(head, states, spent, *held, *cause_lines(causes))


def cause_lines(causes: Iterable[FailureGroup]) -> list[RenderableType]:
    """Return causes with their counts, a line each. Pure."""
    return [Text(f"{count(one.runs):>7}  {shown(str(one.cause), _CAUSE)}") for one in causes]


def _eta(progress: BatchProgress, pace: BatchPace, approvals: AskCount) -> float | None:
    """Return the seconds until those runs have ended that move by themselves; None if unknown.

    Runs that are paused, or wait for people, end when somebody lets them.
    """
    held = progress.paused + min(approvals.count, progress.in_progress)
    moving = progress.open - held
    return None if approvals.more or (held and not moving) else pace.eta_seconds(moving)


def progress_line(
    progress: BatchProgress, pace: BatchPace, approvals: AskCount = AskCount()
) -> str:
    """Return the state of a batch as one plain line."""
    parts = [
        f"{count(progress.done)}/{count(progress.total)} done",
        f"{count(progress.done - progress.completed)} not completed"
        if progress.done > progress.completed
        else "",
        f"{count(progress.in_progress)} in progress",
        f"{count(progress.queued)} queued",
        f"{count(progress.paused)} paused" if progress.paused else "",
        f"{pace.steps_per_second:.1f} steps/s",
        f"{count(progress.tokens)} tokens",
        usd(progress.cost_usd, guessed=progress.default_priced_usd > 0),
        f"submission {state}" if (state := submission_state(progress)) else "",
        f"ETA {seconds(_eta(progress, pace, approvals))}" if progress.open else "",
        str(approvals) if approvals.count else "",
        f"held: {shown(str(progress.held), 200)}" if progress.held else "",
    ]
    return ", ".join(part for part in parts if part)


def submission_state(progress: BatchProgress) -> str:
    """Return the state of a batch's submission; nothing where it is complete."""
    if progress.refused:
        return f"none: {shown(progress.refused, 200)}"
    if progress.waits and not progress.submitted:
        return f"begins when batch {progress.follows} has ended"
    if progress.sealed:
        return "cancelled" if progress.cancel_requested else ""
    if progress.cancel_requested:
        return f"cancelled after {count(progress.submitted)} of {count(progress.total)} lines"
    kind = "incomplete" if progress.submission_stalled else "under way"
    return f"{kind}: {count(progress.submitted)} of {count(progress.total)} lines"
