"""Slim snapshots straight from the store: dropped parts are not read.

The header has all counters, so only the newest entries of the log are read.
"""

from dataclasses import dataclass
from typing import Any

from stepfleet.orchestrator.agents.config import read_overrides
from stepfleet.orchestrator.protocol.serialization import SlimSerializationConfig, SlimSerializer
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.records.steps import LoggedStep
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.configs import Configs
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.records.codec import (
    MESSAGES,
    Fields,
    load_log,
    load_messages,
    load_outcome,
    load_state,
    moment,
)
from stepfleet.orchestrator.store.runs.reading import unknown_run

_MESSAGES_PER_STEP = 2
"""In most steps: an answer with a call, and its result."""


@dataclass(frozen=True, slots=True)
class _Tail:
    """The newest part of a run: its steps from `first` on, and the messages from there."""

    first: int
    log: list[LoggedStep]
    messages: tuple[Message, ...]


class Snapshots:
    """Reads runs in their slim form."""

    def __init__(self, connection: Connection, keys: Keys, configs: Configs) -> None:
        self._connection = connection
        self._keys = keys
        self._configs = configs

    async def take(self, run_id: str, config: SlimSerializationConfig) -> dict[str, Any]:
        """Return a run's snapshot. Raises `NotFoundError` if there is no run of that id."""
        header = await self._header(run_id)
        state = load_state(header, (), (), moment(header["updated"]))
        if outcome := load_outcome(header.get("outcome")):
            state = state.with_continuation_outcome(outcome)
        tail = await self._tail(run_id, int(header["step"]), config)
        system = await self._system(run_id, header, tail) if config.kept_messages else ()
        whole = state.model_copy(update={"messages": (*system, *tail.messages)})
        return SlimSerializer(config).serialize(whole, [logged.result for logged in tail.log])

    async def standing(self, run_id: str) -> tuple[Lifecycle, int]:
        """Return a run's status and how many steps it has committed.

        Raises `NotFoundError` if there is no run of that id.
        """
        found = await self._connection.execute("HMGET", self._keys.run(run_id), "status", "step")
        if found[0] is None:
            raise unknown_run(run_id)
        return Lifecycle(found[0]), int(found[1])

    async def tenant(self, run_id: str) -> str | None:
        """Return whom a run is for. Raises `NotFoundError` if there is no run of that id."""
        found = await self._connection.execute("HMGET", self._keys.run(run_id), "status", "tenant")
        if found[0] is None:
            raise unknown_run(run_id)
        return None if found[1] is None else str(found[1])

    async def _header(self, run_id: str) -> Fields:
        header = await self._connection.execute("HGETALL", self._keys.run(run_id))
        if not header:
            raise unknown_run(run_id)
        return dict(header)

    async def _system(self, run_id: str, header: Fields, tail: _Tail) -> tuple[Message, ...]:
        """Return the instructions: the agent's, or where it has none those of the first input."""
        config = await self._configs.load(header["config"])
        own = read_overrides(header.get("overrides"))
        if instructions := str(own.get("instructions", config.instructions)):
            return (Message.system(instructions),)
        if not tail.first:
            return ()
        key = f"{self._keys.run(run_id)}:log"
        given = await self._connection.execute("HGET", key, "input:0")
        return tuple(one for one in MESSAGES.validate_json(given or "[]") if one.is_system())

    async def _tail(self, run_id: str, steps: int, config: SlimSerializationConfig) -> _Tail:
        """Return enough of the log's end, read from the newest entry backwards."""
        key, wanted = f"{self._keys.run(run_id)}:log", config.kept_messages
        fields: Fields = {}
        tail = _Tail(steps, [], ())
        first, length = steps, max(config.kept_steps, _about(wanted))
        names = [f"input:{steps}"] if wanted else []
        while True:
            before, first = first, max(first - length, 0)
            for number in range(first, before):
                names += [str(number), f"input:{number}"] if wanted else [str(number)]
            if names:
                found = await self._connection.execute("HMGET", key, *names)
                fields |= {name: text for name, text in zip(names, found, strict=True) if text}
                log = load_log(fields)
                tail = _Tail(first, log, _messages(fields, log, first))
            if not first or len(tail.messages) >= wanted:
                return tail
            names, length = [], _about(wanted - len(tail.messages))


def _about(messages: int) -> int:
    """Return how many steps may hold so many messages."""
    return -(-messages // _MESSAGES_PER_STEP)


def _messages(fields: Fields, log: list[LoggedStep], first: int) -> tuple[Message, ...]:
    here = {name: text for name, text in fields.items() if name.startswith("input:")}
    return load_messages("", here, [step.messages for step in log], first)
