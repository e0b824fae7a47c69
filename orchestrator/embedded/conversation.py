"""What is said to a private server over its port; must not know locks, files or processes."""

import contextlib
from collections.abc import Callable
from enum import Enum

import redis

from stepfleet.orchestrator.embedded.folder import Address
from stepfleet.orchestrator.embedded.locks import poll


class Answer(Enum):
    """What a server says when asked whether it is there."""

    READY = "ready"
    LOADING = "loading"
    SILENT = "silent"


def ask(address: Address) -> Answer:
    """Ask whether the server is there and takes the password."""
    with contextlib.closing(_client(address)) as client:
        try:
            client.ping()
        except redis.BusyLoadingError:
            return Answer.LOADING
        except redis.RedisError:
            return Answer.SILENT
        return Answer.READY


def is_ready(address: Address, alive: Callable[[], bool], *, within: float) -> bool:
    """Wait for the server; False where it is not ``alive`` or silent for ``within`` seconds.

    How long it loads its data is not limited.
    """
    poll(lambda: ask(address) is not Answer.SILENT or not alive(), within=within)
    while not poll(lambda: ask(address) is not Answer.LOADING, within=within):
        continue
    return ask(address) is Answer.READY


def rewrite_file(address: Address) -> None:
    """Have the append-only file written anew, whole: what was cut by a crash ends here."""
    with contextlib.closing(_client(address)) as client:
        client.bgrewriteaof()


def shut_down(address: Address) -> None:
    """Ask the server to save and end; nothing happens where none answers."""
    if ask(address) is Answer.SILENT:
        return
    with contextlib.closing(_client(address)) as client, contextlib.suppress(redis.RedisError):
        client.shutdown()


def _client(address: Address) -> redis.Redis:
    return redis.Redis.from_url(address.url, socket_timeout=2.0, retry=None)
