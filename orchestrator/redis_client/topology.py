"""Asks nodes of a cluster for its topology, all at the same time, and believes the newest."""

import asyncio
from collections.abc import Mapping

from redis import exceptions
from redis.asyncio import Redis

from stepfleet.orchestrator.redis_client.slots import Topology, newest
from stepfleet.orchestrator.redis_client.urls import NodeAddress, host_port

SURVEY_SECONDS = 2.0
"""How long one node may take to answer."""


async def survey(clients: Mapping[NodeAddress, Redis]) -> Topology:
    """Return the topology that these nodes tell.

    Raises `redis.exceptions.RedisError` where none answers: what one of them said.
    """
    asked = [_ask(place, client) for place, client in clients.items()]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    told = [one for one in answers if isinstance(one, Topology)]
    if told:
        return newest(told)
    errors = [one for one in answers if isinstance(one, exceptions.RedisError)]
    # One that answers says more of what is wrong than those that cannot be reached.
    errors.sort(key=lambda one: type(one) in (exceptions.ConnectionError, exceptions.TimeoutError))
    if not errors:
        raise exceptions.ConnectionError(f"an answer cannot be read: {answers[0]!r}")
    raise errors[0]


async def _ask(place: NodeAddress, client: Redis) -> Topology:
    pipeline = client.pipeline(transaction=False)
    pipeline.execute_command("CLUSTER", "SLOTS")
    pipeline.execute_command("CLUSTER", "INFO")
    try:
        async with asyncio.timeout(SURVEY_SECONDS):
            slots, info = await pipeline.execute(raise_on_error=False)
    except TimeoutError:
        msg = f"no answer from {host_port(place)} within {SURVEY_SECONDS} s"
        raise exceptions.TimeoutError(msg) from None
    except OSError as error:
        raise exceptions.ConnectionError(f"{host_port(place)}: {error}") from None
    for reply in (slots, info):
        if isinstance(reply, Exception):
            raise reply
    return Topology.told(place, slots, info)
