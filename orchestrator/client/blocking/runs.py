"""The verbs on single runs for plain code. Holds no logic: `run_verbs.RunVerbs` does everything."""

from collections.abc import Iterator
from typing import Any

from stepfleet.orchestrator.client.control import CANCEL_NOTE
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.client.portal import Portal
from stepfleet.orchestrator.client.rendering import RunView, UIMessage
from stepfleet.orchestrator.records.run.results import AgentRunResult
from stepfleet.orchestrator.records.run.tool_traces import ToolTraces
from stepfleet.orchestrator.records.steps import StepResult
from stepfleet.orchestrator.store.runs.control import Answer
from stepfleet.orchestrator.store.runs.reading import StoredRun


class SyncRuns:
    """Verbs on runs that exist; see `RunVerbs` for what each does."""

    _fleet: AsyncFleet
    _portal: Portal

    def show(self, run_id: str) -> StoredRun:
        """Return all that is stored of a run."""
        return self._portal.call(self._fleet.show(run_id))

    def result(self, run_id: str) -> AgentRunResult:
        """Return a run's result, as far as it has come."""
        return self._portal.call(self._fleet.result(run_id))

    def wait(self, run_id: str, timeout: float | None = None) -> AgentRunResult:
        """Return a run's result when it has ended; `TimeoutError` after `timeout` seconds."""
        return self._portal.call(self._fleet.wait(run_id, timeout))

    def events(self, run_id: str, *, follow: bool = False) -> Iterator[dict[str, Any]]:
        """Yield a run's events in order."""
        return self._portal.each(self._fleet.events(run_id, follow=follow))

    def stream(
        self, run_id: str, *, since: int = 0, chunks: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yield a run's events, those to come too, until it has ended."""
        return self._portal.each(self._fleet.stream(run_id, since=since, chunks=chunks))

    def steps(self, run_id: str) -> Iterator[StepResult]:
        """Yield a run's steps as they are committed, until it has ended."""
        return self._portal.each(self._fleet.steps(run_id))

    def view(self, run_id: str) -> RunView:
        """Return a run's history as a chat window shows it."""
        return self._portal.call(self._fleet.view(run_id))

    def display(
        self, run_id: str, *, continuation: bool = False
    ) -> Iterator[tuple[UIMessage, ...]]:
        """Yield all messages of a run's window at each change, until the run has ended."""
        return self._portal.each(self._fleet.display(run_id, continuation=continuation))

    def tool_traces(self, run_id: str) -> ToolTraces:
        """Return the tool calls of a run's committed steps."""
        return self._portal.call(self._fleet.tool_traces(run_id))

    def clear_tool_traces(self, run_id: str) -> int:
        """Leave the calls so far out of `tool_traces`."""
        return self._portal.call(self._fleet.clear_tool_traces(run_id))

    def cancel(self, run_id: str, note: str = CANCEL_NOTE) -> Answer:
        """Cancel a run."""
        return self._portal.call(self._fleet.cancel(run_id, note))

    def pause(self, run_id: str | None = None) -> Answer:
        """Pause a run before its next tool or step; without an id, the whole fleet."""
        return self._portal.call(self._fleet.pause(run_id))

    def resume(self, run_id: str | None = None) -> Answer:
        """Take a pause back: a run's, or without an id the fleet's."""
        return self._portal.call(self._fleet.resume(run_id))

    def retry(self, run_id: str, **overrides: Any) -> Answer:
        """Take an ended run up again at its failed step."""
        return self._portal.call(self._fleet.retry(run_id, **overrides))

    def send(self, run_id: str, text: str, **overrides: Any) -> Answer:
        """Give an ended run a further user message."""
        return self._portal.call(self._fleet.send(run_id, text, **overrides))
