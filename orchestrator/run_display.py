"""A run as a chat window shows it, for clients: its history in one piece, or while it goes on.

Reads what is stored and hands it to `rendering`, which decides what is shown.
"""

from collections.abc import AsyncGenerator

from stepfleet.orchestrator.records.messages import Message
from stepfleet.orchestrator.rendering import (
    LiveMessages,
    Recorded,
    RunView,
    UIMessage,
    rendered,
    view_of,
)
from stepfleet.orchestrator.run_verbs import RunVerbs
from stepfleet.orchestrator.store.loading import MESSAGES
from stepfleet.orchestrator.store.reading import StoredRun

_INPUT = "input:"
Windows = AsyncGenerator[tuple[UIMessage, ...], None]


class RunDisplay(RunVerbs):
    """Verbs for windows on runs."""

    async def view(self, run_id: str) -> RunView:
        """Return a run's history as a chat window shows it, with what it stopped for.

        Raises `ConfigurationError` if there is no such run.
        """
        run = await self.show(run_id)
        return view_of(run.result(), history_of(run))

    async def display(self, run_id: str, *, continuation: bool = False) -> Windows:
        """Yield all messages of a run's window at each change, until the run has ended.

        The last ones are its stored history, with the errors that came up. Text comes while it
        is written where the run tells it (`broadcast="standard"`); `continuation` shows why the
        run stopped where it tells that. Raises `ConfigurationError` if there is no such run.
        """
        run = await self.show(run_id)
        attempts = run.config.model_attempts
        window = LiveMessages(run_id, attempts=attempts, continuation=continuation)
        async for event in self.events(run_id):
            window.add(event)
        shown = window.reconcile(history_of(await self.show(run_id)))
        yield shown
        async for event in self.stream(run_id, since=window.sequence, chunks=True):
            if window.add(event) and window.messages != shown:
                shown = window.messages
                yield shown
        whole = window.reconcile(history_of(await self.show(run_id)))
        if whole != shown:
            yield whole


def inputs_of(run: StoredRun) -> dict[int, tuple[Message, ...]]:
    """Return what a stored run was given, by the number of steps that it had done by then."""
    return {
        int(name.removeprefix(_INPUT)): MESSAGES.validate_json(given)
        for name, given in run.fields.items()
        if name.startswith(_INPUT)
    }


def history_of(run: StoredRun) -> tuple[UIMessage, ...]:
    """Return the history of a stored run."""
    recorded = Recorded(
        run_id=run.run_id,
        started_at=run.state.info.started_at,
        inputs=inputs_of(run),
        log=run.log,
    )
    return rendered(recorded)
