"""Commands to a private server over its port; must not know locks, files or processes."""

import contextlib
import time
from collections.abc import Callable
from enum import Enum

import redis

from stepfleet.orchestrator.store.embedded.folder import Address

_PAUSE_SECONDS = 0.02
_NEWS_SECONDS = 3.0
_SILENT_LOAD_SECONDS = 300.0
"""How long a server that loads may give no answer: between two it applies 1,024 commands."""


class Answer(Enum):
    """The state of a server by its reply to PING."""

    READY = "ready"
    LOADING = "loading"
    SILENT = "silent"


def ask(address: Address) -> Answer:
    """Return whether the server answers and accepts the password."""
    with contextlib.closing(_client(address)) as client:
        try:
            client.ping()
        except redis.BusyLoadingError:
            return Answer.LOADING
        except redis.RedisError:
            return Answer.SILENT
        return Answer.READY


def is_ready(
    address: Address, alive: Callable[[], bool], *, within: float, say: Callable[[str], None]
) -> bool:
    """Wait for the server; False where it is not `alive` or silent for `within` seconds.

    Loading data is not limited: each reply that the server loads begins the time anew. `say` gets
    the progress of a long load.
    """
    started = last_said = time.monotonic()
    deadline = started + within
    while (answer := ask(address)) is not Answer.READY:
        now = time.monotonic()
        if not alive():
            return False
        if answer is Answer.LOADING:
            deadline = now + max(within, _SILENT_LOAD_SECONDS)
            if now - last_said >= _NEWS_SECONDS:
                last_said = now
                say(f"Redis loads its data, {now - started:.0f} s until now{_loaded(address)}")
        elif now >= deadline:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True


def rewrite_as_it_grows(address: Address) -> None:
    """Let the server rewrite its append-only file by itself, whenever it has doubled.

    A server that does not answer keeps its file as it is until the next user.
    """
    with contextlib.closing(_client(address)) as client, contextlib.suppress(redis.RedisError):
        client.config_set("auto-aof-rewrite-percentage", "100")


def shut_down(address: Address) -> None:
    """Ask the server to save and end; nothing happens where none answers."""
    if ask(address) is Answer.SILENT:
        return
    with contextlib.closing(_client(address)) as client, contextlib.suppress(redis.RedisError):
        client.shutdown()


def _loaded(address: Address) -> str:
    """Return how much of its data a server has loaded, if it reports that."""
    with contextlib.closing(_client(address)) as client, contextlib.suppress(redis.RedisError):
        facts = client.info("persistence")
        total = int(facts.get("loading_total_bytes", 0))
        if total:
            done = int(facts.get("loading_loaded_bytes", 0))
            return f": {done / 1e9:.1f} of {total / 1e9:.1f} GB"
    return ""


def _client(address: Address) -> redis.Redis:
    return redis.Redis.from_url(address.url, socket_timeout=2.0, retry=None)
