"""What each gateway of an open store has: the connection, the names of keys, the scripts of runs.

Knows no gateway; `store.Store` makes them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.configs import Configs
from stepfleet.orchestrator.store.dispatch import Dispatch
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.lua import RunScripts


@dataclass(frozen=True)
class Opened:
    """The parts of an open store, which its gateways share.

    `worker` names the worker process that has opened it; `crash` is called where tests end that.
    """

    settings: Settings
    connection: Connection
    keys: Keys
    configs: Configs
    dispatch: Dispatch
    worker: str = ""
    crash: Callable[[str], None] = lambda _: None


class Gateway:
    """Reads and writes one subject of an open store."""

    def __init__(self, opened: Opened) -> None:
        self._settings = opened.settings
        self._connection = opened.connection
        self._keys = opened.keys
        self._configs = opened.configs
        self._dispatch = opened.dispatch
        self._crash = opened.crash
        self._scripts = RunScripts(opened.connection, opened.keys)
        self._pushing = RunScripts(opened.connection, opened.keys, opened.dispatch.queue_key)
        """The scripts that may push messages."""
