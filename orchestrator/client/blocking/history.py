"""The verbs on a run's past and its costs for plain code. Holds no logic: `run_history` has it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.client.checkpoints.record import AgentCheckpoint
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.client.history.comparison import RunComparison
from stepfleet.orchestrator.client.portal import Portal
from stepfleet.orchestrator.models.pricing.ledger import CostStatistics, ModelCall
from stepfleet.orchestrator.protocol.serialization.slim_config import SlimSerializationConfig


class SyncHistory:
    """Verbs on what runs have behind them; see `RunHistory` and `RunCosts` for what each does."""

    _fleet: AsyncFleet
    _portal: Portal

    def snapshot(
        self, run_id: str, config: SlimSerializationConfig | None = None
    ) -> dict[str, Any]:
        """Return a run in short, as JSON data."""
        return self._portal.call(self._fleet.snapshot(run_id, config))

    def checkpoint(self, run_id: str, *, at: int | None = None) -> AgentCheckpoint:
        """Return everything of a run, as it stands or behind its first `at` steps."""
        return self._portal.call(self._fleet.checkpoint(run_id, at=at))

    def checkpoints(
        self, run_id: str, *, every: int, follow: bool = False
    ) -> Iterator[AgentCheckpoint]:
        """Yield a run's checkpoints behind each `every` steps."""
        return self._portal.each(self._fleet.checkpoints(run_id, every=every, follow=follow))

    def restore(
        self,
        checkpoint: AgentCheckpoint,
        agent: Agent | str | None = None,
        *,
        run_id: str | None = None,
        **overrides: Any,
    ) -> str:
        """Create the run of a checkpoint and return its id."""
        work = self._fleet.restore(checkpoint, agent, run_id=run_id, **overrides)
        return self._portal.call(work)

    def save_state(self, run_id: str) -> dict[str, Any]:
        """Return a run's checkpoint as JSON data."""
        return self._portal.call(self._fleet.save_state(run_id))

    def load_state(
        self, state: Mapping[str, Any], agent: Agent | str | None = None, **options: Any
    ) -> str:
        """Create the run that `save_state` has returned."""
        return self._portal.call(self._fleet.load_state(state, agent, **options))

    def fork(
        self,
        run_id: str,
        *,
        at: int | None = None,
        message: str | None = None,
        tools: Sequence[str] | None = None,
        new_run_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> str:
        """Start a run that begins with the first `at` steps of another, and return its id."""
        work = self._fleet.fork(
            run_id,
            at=at,
            message=message,
            tools=tools,
            new_run_id=new_run_id,
            metadata=metadata,
            **overrides,
        )
        return self._portal.call(work)

    def compare(self, first: str, second: str) -> RunComparison:
        """Return how the run `second` differs from `first`."""
        return self._portal.call(self._fleet.compare(first, second))

    def get_cost_calls(self, run_id: str) -> tuple[ModelCall, ...]:
        """Return a run's committed model calls with their costs in USD."""
        return self._portal.call(self._fleet.get_cost_calls(run_id))

    def get_cost_stats(self, run_id: str) -> CostStatistics:
        """Return the sums over those calls, in all and by model."""
        return self._portal.call(self._fleet.get_cost_stats(run_id))

    def get_cost_summary(self, run_id: str) -> str:
        """Return the sums as text."""
        return self._portal.call(self._fleet.get_cost_summary(run_id))

    def reset_cost_tracking(self, run_id: str) -> None:
        """Let the statistics begin anew with the next step."""
        self._portal.call(self._fleet.reset_cost_tracking(run_id))
