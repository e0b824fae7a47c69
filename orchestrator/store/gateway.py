"""What the gateways of an open store share: its parts, and turns of its workers.

Knows no gateway; `store.Store` makes them.
"""

import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.archived import ArchivedRuns, RunReads
from stepfleet.orchestrator.store.configs import Configs
from stepfleet.orchestrator.store.dispatch import Dispatch
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.lua import RunScripts, run_script


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

    @cached_property
    def reads(self) -> RunReads:
        """Reads of runs, archived ones too."""
        archived = ArchivedRuns(self.settings, self.connection, self.keys, self.configs)
        return RunReads(self.connection, archived)


class Gateway:
    """Reads and writes one subject of an open store."""

    def __init__(self, opened: Opened) -> None:
        self._settings = opened.settings
        self._connection = opened.connection
        self._keys = opened.keys
        self._configs = opened.configs
        self._dispatch = opened.dispatch
        self._crash = opened.crash
        self._reads = opened.reads
        self._scripts = RunScripts(opened.connection, opened.keys)
        self._pushing = RunScripts(opened.connection, opened.keys, opened.dispatch.queue_key)
        """The scripts that may push messages."""


class TurnGateway(Gateway):
    """A gateway whose subjects one worker at a time looks after, for some `milliseconds`."""

    def __init__(
        self, opened: Opened, milliseconds: int, key_of_turn: Callable[[str], str]
    ) -> None:
        super().__init__(opened)
        self._key_of_turn = key_of_turn
        self._milliseconds = milliseconds
        self._token = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(6)}"

    async def take(self, name: str) -> bool:
        """Return whether it is the caller's to look at, of all that write by other objects."""
        return await self._turn("take", name)

    async def hold(self, name: str) -> bool:
        """Keep the turn for a while more; return false where it is another's by now."""
        return await self._turn("hold", name)

    async def release(self, name: str) -> None:
        """Give the turn back, unless it is another's."""
        await self._turn("release", name)

    async def _turn(self, word: str, name: str) -> bool:
        key, given = self._key_of_turn(name), (word, self._token, self._milliseconds)
        return bool(await run_script(self._connection, "turn_of", [key], *given))
