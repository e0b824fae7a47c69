"""Forgets configurations that no run refers to, and that were not submitted for the retention time.

Decides when one may go. Runs keep theirs for as long as they exist, whatever their age and state.
"""

from collections.abc import AsyncIterator, Iterable

from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.lua import run_script
from stepfleet.orchestrator.store.opening.opening import OpenStore

LEAST_SECONDS = 24 * 3600
"""However short the retention is: submitters note the use of a configuration once an hour."""
PAUSE_SECONDS = 6 * 3600
"""How often one worker of a fleet looks: it reads the names of all keys where one is old."""
PAGE = 1000
LOOKS = 2


async def forget_configs(store: OpenStore) -> int:
    """Forget stale configurations, if it is time to look; return how many.

    Raises `StoreError` or `redis.exceptions.RedisError` when Redis stays out of reach.
    """
    lock = ("SET", store.keys.of(keys.SWEPT), "1", "NX", "EX", PAUSE_SECONDS)
    if not await store.connection.execute(*lock):
        return 0
    return await forget_stale_configs(store)


async def forget_stale_configs(store: OpenStore) -> int:
    """Forget stale configurations now; return how many."""
    connection, names = store.connection, store.keys
    stale = await _unused(connection, names, max(store.settings.retention, LEAST_SECONDS))
    if stale:
        for digest in await connection.execute("HVALS", names.of(keys.NAMES)):
            stale.pop(digest, None)
    used: set[str] = set()
    connects = connection.connects
    # Twice: one look may miss a run that moves between two servers meanwhile.
    for _ in range(LOOKS if stale else 0):
        async for digests in _referred_to(connection, names):
            used |= digests & stale.keys()
    if connects != connection.connects:  # perhaps to another server, where the scan began anew
        return 0
    if used:
        now = (await connection.now()).timestamp()
        fresh = [part for digest in used for part in (now, digest)]
        await connection.execute("ZADD", names.of(keys.USED), "GT", *fresh)
    for digest in used:
        del stale[digest]
    gone = [await _forget(connection, names, *one) for one in stale.items()]
    return sum(gone)


async def _unused(connection: Connection, names: keys.Keys, seconds: float) -> dict[str, str]:
    """Return old configurations and their last uses; unknown ones count from now on."""
    now = (await connection.now()).timestamp()
    known = await connection.execute("HKEYS", names.of(keys.AGENTS))
    for at in range(0, len(known), PAGE):
        fresh = [part for digest in known[at : at + PAGE] for part in (now, digest)]
        await connection.execute("ZADD", names.of(keys.USED), "NX", *fresh)
    flat = await connection.execute(
        "ZRANGEBYSCORE", names.of(keys.USED), "-inf", f"({now - seconds}", "WITHSCORES"
    )
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def _referred_to(connection: Connection, names: keys.Keys) -> AsyncIterator[set[str]]:
    """Yield the configurations of all runs, page by page."""
    for server in await connection.servers():
        cursor = 0
        while True:
            match = names.of(f"{keys.PREFIX}:{{s*}}:run:*")
            cursor, found = await server.scan(cursor, match, PAGE, "HASH")
            yield await _configs_of(connection, found)
            if not int(cursor):
                break


async def _configs_of(connection: Connection, found: Iterable[str | bytes]) -> set[str]:
    # Other hashes of a run have no such field; a run's id may end like the names of those.
    replies = await connection.execute_all(*(("HGET", key, "config") for key in found))
    return {digest for digest in replies if digest}


async def _forget(connection: Connection, names: keys.Keys, digest: str, used: str) -> bool:
    """Forget a configuration unless it is used meanwhile; return whether it is gone."""
    agents, uses = names.of(keys.AGENTS), names.of(keys.USED)
    text = await connection.execute("HGET", agents, digest)
    if not await run_script(connection, "unused", [uses], digest, used):
        return False
    await connection.execute("HDEL", agents, digest)
    # A user notes its use and then writes the configuration: in between it was there still.
    again = await connection.execute("ZSCORE", uses, digest)
    if again is not None and text is not None:
        await connection.execute("HSETNX", agents, digest, text)
    return again is None
