"""Shows a batch's progress on standard error: live on a terminal, else a line now and then."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.cli.terminal.eta import Pace, Sample
from stepfleet.orchestrator.cli.terminal.format import count, seconds, shown, usd
from stepfleet.orchestrator.cli.terminal.output import notice, screen
from stepfleet.orchestrator.cli.terminal.tables import progress_line
from stepfleet.orchestrator.records.batch import BatchProgress

LIVE_SECONDS = 0.5
PLAIN_SECONDS = 5.0
_BAR_WIDTH = 40


class Display:
    """A batch's progress over time. `update` decides itself when to show something new."""

    def __init__(
        self, *, live: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._started = clock()
        self._pace = Pace()
        self._shown_at = float("-inf")
        wanted = sys.stderr.isatty() if live is None else live
        console = screen(stderr=True)
        self._live = Live(console=console, auto_refresh=False, transient=True) if wanted else None

    def update(self, progress: BatchProgress, *, last: bool = False) -> None:
        """Take the newest progress; shown at once where it is the `last` one."""
        now = self._clock()
        self._pace = self._pace.with_sample(Sample(now, progress.done, progress.steps))
        if self._live:
            self._live.update(picture(progress, self._pace, now - self._started), refresh=True)
        elif last or now - self._shown_at >= PLAIN_SECONDS:
            self._shown_at = now
            notice(progress_line(progress, self._pace))

    def say(self, text: str) -> None:
        """Say something above the progress."""
        if self._live:
            self._live.console.print(Text(text))
        else:
            notice(text)

    def leave(self) -> None:
        """Put the terminal right before the process ends at once."""
        if self._live:
            self._live.console.show_cursor()

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()


def picture(progress: BatchProgress, pace: Pace, elapsed: float) -> RenderableType:
    """Return what a terminal shows of a running batch. Pure."""
    head = Table.grid(padding=(0, 1))
    head.add_row(
        Text(shown(progress.agent or "batch", 30), style="bold"),
        ProgressBar(total=max(1, progress.total), completed=progress.done, width=_BAR_WIDTH),
        f"{count(progress.done)}/{count(progress.total)}",
        f"{seconds(elapsed)}, ETA {seconds(pace.eta_seconds(progress.open))}",
    )
    states = Text()
    for label, value, style in (
        ("completed", progress.completed, "green"),
        ("failed", progress.failed, "red"),
        ("stopped", progress.stopped, "yellow"),
        ("cancelled", progress.cancelled, "yellow"),
        ("running", progress.in_progress, "cyan"),
        ("queued", progress.queued, ""),
        ("paused", progress.paused, "magenta"),
    ):
        if value or label in {"completed", "running", "queued"}:
            states.append(f"{count(value)} {label}  ", style=style)
    spent = Text(
        f"{count(progress.steps)} steps ({pace.steps_per_second:.1f}/s)  "
        f"{count(progress.tokens)} tokens  {usd(progress.cost_usd)}",
        style="dim",
    )
    return Group(head, states, spent)
