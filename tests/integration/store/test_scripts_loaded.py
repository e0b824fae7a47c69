"""The scripts are with Redis before the first step needs them."""

import urllib.parse
from collections.abc import Iterator

import pytest
import redis
from support.runs.stored_runs import bench

from stepfleet.orchestrator.store.lua import RENEWALS, digest, scripts

STEP = ("claim", "journal", "commit")


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as opened:
        yield opened


@pytest.fixture
def who_may_not_load(redis_url: str, client: redis.Redis) -> Iterator[str]:
    """Address of the server for a user whom it refuses SCRIPT."""
    client.acl_setuser(
        "runner",
        enabled=True,
        passwords=["+secret"],
        keys=["*"],
        channels=["*"],
        categories=["+@all"],
        commands=["-script"],
    )
    parts = urllib.parse.urlsplit(redis_url)
    yield parts._replace(netloc=f"runner:secret@{parts.netloc.rpartition('@')[2]}").geturl()
    client.acl_deluser("runner")


async def test_a_prepared_store_has_loaded_all_scripts(redis_url: str, client: redis.Redis) -> None:
    """Else a thousand leases that are renewed at once send that script a thousand times."""
    every = sorted(scripts() | RENEWALS.keys())
    async with bench(redis_url) as desk:
        assert not any(client.script_exists(*map(digest, every)))
        await desk.steps.prepare()
        assert dict(zip(every, client.script_exists(*map(digest, every)), strict=True)) == (
            dict.fromkeys(every, True)
        )


async def test_where_loading_is_refused_a_script_comes_with_its_call(
    who_may_not_load: str, client: redis.Redis
) -> None:
    async with bench(who_may_not_load) as desk:
        await desk.steps.prepare()
        assert client.script_exists(*map(digest, STEP)) == [False] * 3
        await desk.claim(await desk.create())
