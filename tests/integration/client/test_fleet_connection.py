"""Opening a fleet: what is said within seconds where that cannot work."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.servers.redis_servers import RedisServer, free_port

from stepfleet import Agent, Fleet
from stepfleet.orchestrator import AsyncFleet, ConfigurationError, StoreError
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.dispatch import client_app
from stepfleet.orchestrator.store.embedded import EmbeddedRedis
from stepfleet.orchestrator.store.store import open_store


async def refusal(url: str, error: type[Exception], **settings: object) -> str:
    """Return what is said, long before the patience of calls is at its end."""
    patient = load_settings(redis_url=url, patience=3600, **settings)
    with pytest.raises(error) as caught:
        async with asyncio.timeout(60), AsyncFleet(settings=patient):
            pass
    return str(caught.value)


async def test_a_dead_redis_is_reported_within_seconds() -> None:
    port = free_port()
    said = await refusal(f"redis://user:secret@127.0.0.1:{port}/0", StoreError)
    assert f"Redis at 127.0.0.1:{port} cannot be reached" in said
    assert "secret" not in said


async def test_a_frozen_redis_is_reported_within_seconds(
    own_redis: Callable[..., RedisServer],
) -> None:
    server = own_redis()
    server.freeze()
    assert "cannot be reached" in await refusal(server.url, StoreError)


async def test_a_redis_that_starts_a_moment_later_is_waited_for(
    own_redis: Callable[..., RedisServer],
) -> None:
    server = own_redis()
    server.stop()
    fleet = AsyncFleet(server.url)
    try:
        with pytest.raises(StoreError):
            await fleet.check()
        server.start()
        await fleet.check()
    finally:
        await fleet.aclose()


@pytest.mark.parametrize("user", ["", ":wrong@"])
async def test_a_missing_or_wrong_password_is_reported_with_the_fix(
    own_redis: Callable[..., RedisServer], user: str
) -> None:
    server = own_redis(requirepass="right")
    said = await refusal(f"redis://{user}127.0.0.1:{server.port}/0", ConfigurationError)
    assert "refuses the credentials" in said
    assert "STEPFLEET_REDIS_URL" in said
    assert "wrong" not in said.replace("WRONGPASS", "")
    async with AsyncFleet(f"redis://:right@127.0.0.1:{server.port}/0") as fleet:
        await fleet.check()


@pytest.mark.parametrize("url", ["http://127.0.0.1", "localhost:6379", "redis://127.0.0.1:many/0"])
def test_an_address_that_is_none_is_reported(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"redis_url.*redis://"):
        load_settings(redis_url=url)


async def test_an_address_that_asks_for_resp3_is_reported_and_one_for_resp2_is_taken(
    redis_url: str,
) -> None:
    with pytest.raises(ConfigurationError, match="leave 'protocol' out"):
        AsyncFleet(f"{redis_url}?protocol=3")
    async with AsyncFleet(f"{redis_url}?protocol=2") as fleet:
        await fleet.check()


async def test_no_address_at_all_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEPFLEET_REDIS_URL", raising=False)
    with pytest.raises(ConfigurationError, match="no Redis is named"):
        await AsyncFleet().check()


async def test_the_private_server_of_the_folder_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEPFLEET_REDIS_URL", raising=False)
    with EmbeddedRedis.start(tmp_path / ".stepfleet") as server:
        async with AsyncFleet() as fleet:
            await fleet.check()
            assert (await fleet.overview()).active == 0
        async with AsyncFleet(server.url) as fleet:
            await fleet.check()


async def test_the_number_of_shards_is_fixed_at_the_first_use(redis_url: str) -> None:
    first = await open_store(load_settings(redis_url=redis_url, shards=4))
    await first.aclose()
    assert first.keys.shards == 4
    silent = await open_store(load_settings(redis_url=redis_url))
    await silent.aclose()
    assert silent.keys.shards == 4
    said = await refusal(redis_url, ConfigurationError, shards=8)
    assert "set up with 4 shards and the settings say 8; set STEPFLEET_SHARDS=4" in said


async def test_a_unix_socket_works(own_redis: Callable[..., RedisServer]) -> None:
    server = own_redis()
    async with AsyncFleet(server.unix_url) as fleet:
        await fleet.check()
        assert (await fleet.overview()).active == 0


async def test_a_sound_server_gives_no_warning_and_a_risky_one_names_the_fixes(
    own_redis: Callable[..., RedisServer],
) -> None:
    async with AsyncFleet(own_redis().url) as fleet:
        assert await fleet.warnings() == []
    risky = own_redis(appendonly="no", maxmemory_policy="allkeys-lru")
    async with AsyncFleet(risky.url) as fleet:
        durability, eviction = await fleet.warnings()
    assert "CONFIG SET appendonly yes" in durability
    assert "allkeys-lru" in eviction
    assert "CONFIG SET maxmemory-policy noeviction" in eviction


def test_a_clients_celery_app_sends_json_without_results_over_plain_transports() -> None:
    settings = load_settings(
        redis_url="redis://127.0.0.1:1/0", broker_url="redis-batch://127.0.0.1:1/0"
    )
    with client_app(settings) as app:
        assert app.conf.broker_url == "redis://127.0.0.1:1/0"
        assert (app.conf.task_serializer, app.conf.accept_content) == ("json", ["json"])
        assert app.conf.result_backend is None
        assert app.conf.task_ignore_result is True
        assert app.connection_for_write().transport_cls == "redis"


UNFINISHED = """
import sys
from stepfleet import Fleet

with Fleet(sys.argv[1]) as fleet:
    print([event.type for event in fleet.runs.events(sys.argv[2])])
"""


def test_a_program_ends_though_an_error_keeps_an_iterator_of_its_fleet(redis_url: str) -> None:
    """The traceback holds the iterator until the interpreter ends, which starts no more threads."""
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(Agent("plain", model="openai:none"), "x")
    program = [sys.executable, "-c", UNFINISHED, redis_url, run_id]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert "AttributeError: 'dict' object has no attribute 'type'" in ended.stderr
