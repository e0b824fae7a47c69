"""Notes about isolated processes: the work that they begin, and the work at which they died."""

from dataclasses import replace

from stepfleet.orchestrator.protocol.claim import How, Work
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.dispatch import Dispatch
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.lua import RunScripts


class IsolationMarks:
    """Notes the work that begins in isolated processes, and counts their deaths."""

    def __init__(self, connection: Connection, keys: Keys, dispatch: Dispatch) -> None:
        self._connection = connection
        self._keys = keys
        self._dispatch = dispatch
        self._scripts = RunScripts(connection, keys)

    async def begin(self, hint: Work, token: str, group: int) -> bool:
        """Note that the owner of `token` begins, one of `group` in its process.

        Returns False, and notes nothing, where the work is somebody else's by now.
        """
        work = (hint.run_id, hint.step, token, "" if hint.index is None else hint.index)
        return bool(await self._scripts.run("tried", *work, group))

    async def died(self, hint: Work, token: str, group: int, agent: str) -> None:
        """Count the death of the process that had it, one of `group`, and dispatch it again.

        `agent` names the run's agent, for people.
        """
        step = hint.of_step
        is_step = hint.index is None
        message = self._dispatch.message(step, agent) if is_step else ""
        pushing = replace(self._scripts, queue=self._dispatch.queue_key)
        how = f"{How.ALONE}{group}"
        if await _died(pushing, hint, token, how, message=message) and is_step:
            await self._dispatch.published(step, agent)

    async def child_died(self, hint: Work, worker: str) -> bool:
        """Count the death of a pool's child, known as `worker`, if it had the work."""
        return await _died(self._scripts, hint, "", How.CHILD, worker=worker)

    async def worker_of(self, hint: Work) -> str:
        """Return the name of the worker that had the work last, or ''."""
        key, field = self._keys.run(hint.run_id), "worker"
        if hint.index is not None:
            key, field = f"{key}:journal", f"w:{hint.index}"
        return str(await self._connection.execute("HGET", key, field) or "")


async def _died(
    scripts: RunScripts,
    hint: Work,
    token: str,
    how: str,
    message: str = "",
    worker: str = "",
) -> bool:
    work = (hint.run_id, hint.step, token, "" if hint.index is None else hint.index)
    return bool(await scripts.run("died", *work, how, message, worker))
