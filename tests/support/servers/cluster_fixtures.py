"""Fixtures for tests that hold on a Redis Cluster as they do on one Redis; the broker is beside it.

Redis itself sees to it that each script touches one slot: a script that begins with `#!lua` may
not do more.
"""

import pytest
from support.servers.redis_cluster import RedisCluster
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator.store import lua

STRICT = "#!lua\n"


@pytest.fixture
def one_slot_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Redis refuse a script that touches two slots, also where one node has both."""
    text = lua.text

    def strict(name: str) -> str:
        given = text(name)
        return given if given.startswith("#!") else STRICT + given

    monkeypatch.setattr(lua, "text", strict)
    monkeypatch.setattr(lua, "digest", lua.digest.__wrapped__)


@pytest.fixture
def redis_url(
    cluster: RedisCluster,
    redis_server: RedisServer,
    one_slot_scripts: None,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """Address of the cluster; the broker is the session's one Redis. Both are emptied."""
    cluster.flush()
    redis_server.flush()
    monkeypatch.setenv("STEPFLEET_BROKER_URL", redis_server.url)
    return cluster.url
