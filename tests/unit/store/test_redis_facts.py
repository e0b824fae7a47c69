from typing import Any

import redis
from redis.exceptions import ResponseError

from stepfleet.orchestrator.store.fleet.servers import infos, infos_of_masters

SECTIONS = {"server": {"redis_version": "6.2.14"}, "memory": {"maxmemory_policy": "noeviction"}}
BOTH = {"redis_version": "6.2.14", "maxmemory_policy": "noeviction"}


class BeforeRedis7(redis.Redis):
    """A server that takes one section of `INFO` at a time, as all before Redis 7 do."""

    def execute_command(self, *args: Any, **_: Any) -> Any:
        command, *sections = args
        assert command == "INFO"
        if len(sections) > 1:
            raise ResponseError("syntax error")
        return SECTIONS[sections[0]]

    def get_primaries(self) -> list[str]:
        return ["one", "two"]


def test_facts_are_read_of_a_server_before_redis_7() -> None:
    assert infos(BeforeRedis7(), *SECTIONS) == [BOTH]


def test_facts_are_read_of_masters_before_redis_7() -> None:
    assert infos_of_masters(BeforeRedis7(), *SECTIONS) == [BOTH, BOTH]
