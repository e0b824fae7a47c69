"""Facts noted beside a run that its steps do not know."""

from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.lua import RunScripts
from stepfleet.orchestrator.store.runs.reading import unknown_run

COST_FROM = "cost_from"
"""The step (from 0) from which a run's cost statistics count."""


async def mark(
    connection: Connection, keys: Keys, run_id: str, name: str, value: str | int
) -> None:
    """Note `value` under `name`. Raises `ConfigurationError` if there is no run of that id."""
    if not await RunScripts(connection, keys).run("mark", run_id, name, value):
        raise unknown_run(run_id)
