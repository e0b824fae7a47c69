"""Connections to the master that Sentinels name; each new connection asks them again.

Believes the Sentinel with the highest configuration epoch, since one that was cut off from the
others keeps an old one, and only a server that calls itself master. Must not know the commands.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.retry import Retry as PlainRetry
from redis.sentinel import Sentinel

from stepfleet.orchestrator.redis_client.node import RenewablePool
from stepfleet.orchestrator.redis_client.urls import SentinelUrl, parse_sentinel

SENTINEL_SECONDS = 1.0
"""How long one Sentinel may take to answer; all are queried at the same time."""


class Sentinels:
    """Knows the Sentinels of one service, and asks them where its master is."""

    def __init__(self, url: SentinelUrl) -> None:
        self._url = url

    async def master(self) -> tuple[str, int]:
        """Return host and port of the master.

        Raises `redis.exceptions.ConnectionError` while no Sentinel that answers knows one.
        """
        answers = await asyncio.gather(
            *(self._ask(host, port) for host, port in self._url.sentinels), return_exceptions=True
        )
        states = [one for one in answers if isinstance(one, Mapping)]
        found = elected(states)
        if found is None:
            raise exceptions.ConnectionError(self._refusal(answers))
        return found

    async def _ask(self, host: str, port: int) -> Mapping[str, Any] | None:
        options = sentinel_options(self._url)
        client = Redis(host=host, port=port, retry=Retry(NoBackoff(), 0), **options)
        try:
            masters: Any = await client.sentinel_masters()
        finally:
            await client.aclose()
        state: Mapping[str, Any] | None = masters.get(self._url.service)
        return state

    def _refusal(self, answers: Sequence[object]) -> str:
        errors = [str(one) for one in answers if isinstance(one, BaseException)]
        if len(errors) == len(answers):
            return f"no Sentinel answers: {errors[0]}"
        if any(isinstance(one, Mapping) for one in answers):
            return f"the Sentinels have no master for {self._url.service!r} at the moment"
        return f"the Sentinels know no service {self._url.service!r}"


def elected(states: Sequence[Mapping[str, Any]]) -> tuple[str, int] | None:
    """Return the master's address by the Sentinels' states of a service; None while it is down."""
    sound = [
        one
        for one in states
        if one["is_master"] and not one.get("is_sdown") and not one.get("is_odown")
    ]
    if not sound:
        return None
    newest = max(sound, key=lambda one: int(one.get("config-epoch", 0)))
    return str(newest["ip"]), int(newest["port"])


class _ToMaster:
    """Mixed into a connection class: asks the Sentinels before it connects."""

    def __init__(self, *, sentinels: Sentinels, **options: Any) -> None:
        super().__init__(**options)
        self._sentinels = sentinels

    async def _connect(self) -> None:
        self.host, self.port = await self._sentinels.master()
        await super()._connect()  # type: ignore[misc] # the class behind has it

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        connection: Any = super()
        await connection.on_connect_check_health(check_health=check_health)
        own: Any = self
        await own.send_command("ROLE", check_health=False)
        try:
            role = (await own.read_response())[0]
        except exceptions.NoPermissionError:
            return  # an ACL without ROLE: a replica will say so at the first write
        if role not in ("master", b"master"):
            msg = f"{self.host}:{self.port} is not a master, though the Sentinels still name it"
            raise exceptions.ConnectionError(msg)


class MasterConnection(_ToMaster, Connection):
    """A connection to the master."""


class TlsMasterConnection(_ToMaster, SSLConnection):
    """The same over TLS."""


def master_pool(url: str, **options: Any) -> RenewablePool:
    """Return a pool of connections to the master. Raises `ValueError` for an unusable URL."""
    parsed = parse_sentinel(url)
    return RenewablePool(
        connection_class=MasterConnection if parsed.tls is None else TlsMasterConnection,
        sentinels=Sentinels(parsed),
        **_own_options(parsed),
        **options,
    )


def master_client(url: str, *, seconds: float, **options: Any) -> Any:
    """Return a synchronous client of the master that waits `seconds` at most for each answer.

    For occasional reads. Raises `ValueError` for an unusable URL.
    """
    parsed = parse_sentinel(url)
    once = PlainRetry(NoBackoff(), 0)
    timeouts = {"socket_timeout": seconds, "socket_connect_timeout": seconds}
    sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
        list(parsed.sentinels),
        sentinel_kwargs={**sentinel_options(parsed), "retry": once},
        **_own_options(parsed),
        **({"ssl": True} if parsed.tls is not None else {}),
        **timeouts,
        **options,
    )
    return sentinel.master_for(parsed.service, retry=once)


def sentinel_options(url: SentinelUrl) -> dict[str, Any]:
    """Return redis-py's options for connections to the Sentinels themselves."""
    options: dict[str, Any] = {
        "socket_timeout": SENTINEL_SECONDS,
        "socket_connect_timeout": SENTINEL_SECONDS,
        "protocol": 2,
    }
    if url.sentinel_username:
        options["username"] = url.sentinel_username
    if url.sentinel_password:
        options["password"] = url.sentinel_password
    if url.tls is not None:
        options.update(ssl=True, **url.tls)
    return options


def _own_options(url: SentinelUrl) -> dict[str, Any]:
    return {
        "db": url.db,
        "username": url.username,
        "password": url.password,
        **(url.tls or {}),
    }
