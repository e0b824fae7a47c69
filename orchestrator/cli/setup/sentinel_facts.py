"""Reads the state of a store's Sentinels. Judges nothing."""

import contextlib
from dataclasses import dataclass
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from stepfleet.orchestrator.redis_client.sentinel import sentinel_options
from stepfleet.orchestrator.redis_client.urls import parse_sentinel


@dataclass(frozen=True, slots=True)
class SentinelFacts:
    """The state of Sentinels: how many the URL names, how many answer, and the master's replicas.

    `known` counts the Sentinels that know each other, `quorum` how many must agree that the
    master is down.
    """

    named: int
    answering: int
    known: int
    quorum: int
    replicas: int


def sentinel_facts(url: str) -> SentinelFacts:
    """Return the facts of the Sentinels of `url`, within a second each."""
    parsed = parse_sentinel(url)
    once = Retry(NoBackoff(), 0)
    states: list[Any] = []
    for host, port in parsed.sentinels:
        client = redis.Redis(host=host, port=port, retry=once, **sentinel_options(parsed))
        with contextlib.closing(client), contextlib.suppress(RedisError, OSError):
            states.append(client.sentinel_master(parsed.service))
    return SentinelFacts(
        named=len(parsed.sentinels),
        answering=len(states),
        known=max((int(one["num-other-sentinels"]) + 1 for one in states), default=0),
        quorum=max((int(one["quorum"]) for one in states), default=0),
        replicas=max((int(one["num-slaves"]) for one in states), default=0),
    )
