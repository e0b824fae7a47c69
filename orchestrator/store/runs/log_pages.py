"""Reads the pages that a claim leaves out of a long log, or of a large journal."""

from typing import Any

from stepfleet.orchestrator.store.lua import RunScripts

WHOLE = 6
"""Parts of a claim's reply that is complete."""
MOST_NAMES = 1000
"""Fields of the journal that one call reads."""
LOST_WHILE_READ = "the step was taken over while its log was read"


async def read_on(scripts: RunScripts, claim: tuple[str, int, str, int], reply: list[Any]) -> bool:
    """Add the missing pages to a claim's `reply`; each page renews the lease.

    `claim`: run id, step, token and lease in ms. Returns False where the claim has lost the step
    meanwhile: then the pages may be of two logs. Raises as `Connection.execute` does.
    """
    _, _, _, log, journal, _, began, following, left = reply
    while following != "":
        page = await scripts.run("page", *claim, began, following)
        if page[0] != "page":
            return False
        log.extend(page[1])
        following = page[2]
    while left:
        names = left[:MOST_NAMES]
        page = await scripts.run("page", *claim, began, "", *names)
        if page[0] != "page":
            return False
        journal.extend(page[3])
        left = left[page[4] :]
    return True
