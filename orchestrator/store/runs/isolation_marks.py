"""What processes do to the work that they have: who begins it in company, who has died of it."""

from collections.abc import Sequence

from stepfleet.orchestrator.protocol.claim import StepHint
from stepfleet.orchestrator.protocol.suspicion import How
from stepfleet.orchestrator.protocol.waiting import ToolHint
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.dispatch import Dispatch
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.lua import run_script


class TrialMarks:
    """Notes what begins in a process for suspects, and counts what such a process has died with."""

    def __init__(self, connection: Connection, keys: Keys, dispatch: Dispatch) -> None:
        self._connection = connection
        self._keys = keys
        self._dispatch = dispatch

    async def begin(self, hint: StepHint | ToolHint, token: str, group: int) -> bool:
        """Note that the owner of `token` begins, one of `group` in its process.

        Returns False, and notes nothing, where the work is somebody else's by now.
        """
        keys = self._keys.script_keys(hint.run_id, None)
        given = (hint.run_id, hint.step, token, _index(hint), group)
        return bool(await run_script(self._connection, "tried", keys, *given))

    async def died(self, hint: StepHint | ToolHint, token: str, group: int, agent: str) -> None:
        """Count the death of the process that had it, one of `group`, and dispatch it again.

        `agent` names the run's agent, for people.
        """
        step = StepHint(hint.run_id, hint.step)
        is_step = isinstance(hint, StepHint)
        message = self._dispatch.message(step, agent) if is_step else ""
        told = (token, f"{How.ALONE}{group}", message, "")
        if await self._died(hint, told, self._dispatch.queue_key) and is_step:
            await self._dispatch.published(step, agent)

    async def child_died(self, hint: StepHint | ToolHint, worker: str) -> bool:
        """Count the death of a pool's child, known as `worker`, if it had the work."""
        return await self._died(hint, ("", How.CHILD, "", worker), None)

    async def worker_of(self, hint: StepHint | ToolHint) -> str:
        """Return the name of the worker that had the work last, or ''."""
        run = self._keys.run(hint.run_id)
        key, field = (run, "worker")
        if isinstance(hint, ToolHint):
            key, field = (f"{run}:journal", f"w:{hint.index}")
        return str(await self._connection.execute("HGET", key, field) or "")

    async def _died(
        self, hint: StepHint | ToolHint, told: Sequence[str], queue: str | None
    ) -> bool:
        token, how, message, worker = told
        keys = self._keys.script_keys(hint.run_id, queue)
        given = (hint.run_id, hint.step, token, _index(hint), how, message, worker)
        return bool(await run_script(self._connection, "died", keys, *given))


def _index(hint: StepHint | ToolHint) -> int | str:
    return hint.index if isinstance(hint, ToolHint) else ""
