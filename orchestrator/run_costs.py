"""What a client asks of a run's costs. Prices are those of the moment of each call."""

from stepfleet.orchestrator.checkpoints.capture import cost_calls
from stepfleet.orchestrator.fleet_connection import FleetConnection
from stepfleet.orchestrator.pricing.ledger import CostStatistics, ModelCall, statistics_of
from stepfleet.orchestrator.store.marks import COST_FROM, mark


class RunCosts(FleetConnection):
    """Verbs on a run's costs, over all its sessions, also those before a checkpoint."""

    async def get_cost_calls(self, run_id: str) -> tuple[ModelCall, ...]:
        """Return a run's committed model calls with their costs in USD, since the last reset."""
        run = await (await self._open()).runs.get(run_id)
        first = max(int(run.header.get(COST_FROM, "0")) - run.first, 0)
        return tuple(cost_calls(run.config, [logged.result for logged in run.log[first:]]))

    async def get_cost_stats(self, run_id: str) -> CostStatistics:
        """Return the sums over those calls, in all and by model."""
        return statistics_of(await self.get_cost_calls(run_id))

    async def get_cost_summary(self, run_id: str) -> str:
        """Return the sums as text, a line per model."""
        told = await self.get_cost_stats(run_id)
        lines = [
            f"{told.total_calls} calls, {told.total_tokens:,} tokens, {told.total_cost:.6f} USD"
        ]
        for model, sums in sorted(told.by_model.items()):
            lines.append(
                f"  {model}: {sums.calls} calls, {sums.input_tokens:,} tokens in, "
                f"{sums.output_tokens:,} out, {sums.cost:.6f} USD"
            )
        return "\n".join(lines)

    async def reset_cost_tracking(self, run_id: str) -> None:
        """Let the statistics begin anew with the next step; the run's own totals stay.

        Raises `ConfigurationError` if there is no run of that id.
        """
        client = await self._open()
        _, done = await client.snapshots.standing(run_id)
        await mark(client.store.connection, client.store.keys, run_id, COST_FROM, done)
