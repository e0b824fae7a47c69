"""What a client asks about a run's tool calls, from any process and at any time."""

from stepfleet.orchestrator.fleet_connection import FleetConnection
from stepfleet.orchestrator.records.tool_traces import ToolTraces, tool_traces_of
from stepfleet.orchestrator.store.calls import run_script

CLEARED = "traces_cleared"


class RunToolTraces(FleetConnection):
    """Verbs on the tool calls of runs."""

    async def tool_traces(self, run_id: str) -> ToolTraces:
        """Return the tool calls of a run's committed steps since they were last cleared.

        Raises `ConfigurationError` if there is no such run.
        """
        run = await (await self._open()).runs.get(run_id)
        cleared = int(run.header.get(CLEARED, "0"))
        return tool_traces_of((step.result for step in run.log), cleared)

    async def clear_tool_traces(self, run_id: str) -> int:
        """Leave the calls so far out of `tool_traces`; return how many the run has had.

        The run's log keeps them: results, conversation and retries are as before. Raises
        `ConfigurationError` if there is no such run.
        """
        client = await self._open()
        run = await client.runs.get(run_id)
        count = sum(len(step.result.tool_calls) for step in run.log)
        keys = client.store.keys.script_keys(run_id, None)
        await run_script(client.store.connection, "clear_traces", keys, run_id, CLEARED, count)
        return count
