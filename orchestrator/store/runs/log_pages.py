"""Reads on where a claim got a part only of a long log, or of a large journal."""

from collections.abc import Sequence
from typing import Any

from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.lua import run_script

WHOLE = 6
"""Parts of a claim's reply that holds everything."""
MOST_NAMES = 1000
"""Fields of the journal that one call asks for."""
LOST_WHILE_READ = "the step was taken over while its log was read"


async def read_on(
    connection: Connection, keys: list[str], about: Sequence[Any], reply: list[Any]
) -> bool:
    """Add to a claim's `reply` what is missing, page by page; each page renews the lease.

    `about`: run id, step, token and lease in ms. Returns False where the claim has lost the step
    meanwhile: then what was read may be of two logs. Raises as `Connection.execute`.
    """
    _, _, _, log, journal, _, began, following, left = reply
    while following != "":
        page = await run_script(connection, "page", keys, *about, began, following)
        if page[0] != "page":
            return False
        log.extend(page[1])
        following = page[2]
    while left:
        names = left[:MOST_NAMES]
        page = await run_script(connection, "page", keys, *about, began, "", *names)
        if page[0] != "page":
            return False
        journal.extend(page[3])
        left = left[page[4] :]
    return True
