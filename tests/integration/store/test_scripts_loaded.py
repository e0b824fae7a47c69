"""The scripts of a step are with Redis before the first one needs them."""

import urllib.parse
from collections.abc import Iterator

import pytest
import redis
from support.runs.stored_runs import bench

from stepfleet.orchestrator.store.lua import digest

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


async def test_a_prepared_store_has_loaded_the_scripts(redis_url: str, client: redis.Redis) -> None:
    async with bench(redis_url) as desk:
        assert client.script_exists(*map(digest, STEP)) == [False] * 3
        await desk.steps.prepare()
        assert client.script_exists(*map(digest, STEP)) == [True] * 3


async def test_where_loading_is_refused_a_script_comes_with_its_call(
    who_may_not_load: str, client: redis.Redis
) -> None:
    async with bench(who_may_not_load) as desk:
        await desk.steps.prepare()
        assert client.script_exists(*map(digest, STEP)) == [False] * 3
        await desk.claim(await desk.create())
