"""The bytes that creating runs sends to Redis, without sending them: what the floor of submit is.

The commands are made by Stepfleet's own submission, over a connection that only keeps them.
"""

import asyncio
from datetime import UTC, datetime
from typing import Any, cast

import hiredis
from agents import runner

from stepfleet import Message
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.batches.batches import batch_id_of, run_id_of
from stepfleet.orchestrator.store.configs import Configs
from stepfleet.orchestrator.store.dispatch import Dispatch, client_app
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.lua import source
from stepfleet.orchestrator.store.runs.submission import NewRun
from stepfleet.orchestrator.store.store import Store


class Kept:
    """Takes commands as a connection to Redis does, and keeps them packed."""

    def __init__(self) -> None:
        self.commands: list[bytes] = []

    async def execute(self, *command: Any) -> str:
        """Keep the command."""
        self.commands.append(hiredis.pack_command(command))
        return "created"

    async def now(self) -> datetime:
        """Return this machine's time."""
        return datetime.now(UTC)


def create_calls(inputs: list[dict[str, str]], redis_url: str) -> list[bytes]:
    """Return the packed EVALSHA calls that create a run for each input."""
    settings = load_settings(redis_url=redis_url)
    kept = Kept()
    connection = cast("Connection", kept)
    dispatch = Dispatch(client_app(settings), kept, settings.queue, in_script=True)
    keys = Keys(settings.shards)
    submission = Store(settings, connection, keys, Configs(connection), dispatch).submission
    batch_id = batch_id_of(inputs[0]["id"])

    async def create() -> None:
        for row, line in enumerate(inputs):
            await submission.create(
                NewRun(
                    run_id=run_id_of(batch_id, row),
                    agent=runner.name,
                    config=runner.config.digest,
                    messages=(Message.user(line["input"]),),
                    max_steps=runner.config.max_steps,
                    batch_id=batch_id,
                    row=row,
                    line_id=line["id"],
                )
            )

    asyncio.run(create())
    return kept.commands


def script() -> str:
    """Return the text of the script that creates a run."""
    return source("create")
