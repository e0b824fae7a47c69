"""Notes in a run which version of the records it holds from here on: that of its newest writer.

Workers and clients of the version before read their own records only. They refuse a run that was
noted as newer, before they would misread it, and leave it to newer ones.
"""

from stepfleet.orchestrator.records.base import SCHEMA_VERSION
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.lua import run_script


async def note_version(connection: Connection, keys: Keys, run_id: str) -> None:
    """Note that records of this version are written to the run; a newer note stays."""
    await run_script(connection, "version", keys.script_keys(run_id, None), run_id, SCHEMA_VERSION)
