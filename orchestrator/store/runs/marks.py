"""Facts noted beside a run that its steps do not know."""

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.lua import run_script

COST_FROM = "cost_from"
"""The step (from 0) from which a run's cost statistics count."""


async def mark(
    connection: Connection, keys: Keys, run_id: str, name: str, value: str | int
) -> None:
    """Note `value` under `name`. Raises `ConfigurationError` if there is no run of that id."""
    if not await run_script(
        connection, "mark", keys.script_keys(run_id, None), run_id, name, value
    ):
        msg = f"no run has the id {run_id!r}; ended runs are removed after the retention time"
        raise ConfigurationError(msg)
