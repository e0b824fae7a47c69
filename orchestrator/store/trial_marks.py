"""Which steps and tool calls have ended a process of their own, and so are to blame for it."""

from stepfleet.orchestrator.protocol.claim import StepHint
from stepfleet.orchestrator.protocol.waiting import ToolHint
from stepfleet.orchestrator.records.results import LostAttempt
from stepfleet.orchestrator.store.calls import run_script
from stepfleet.orchestrator.store.connection import Connection
from stepfleet.orchestrator.store.keys import Keys


class TrialMarks:
    """Notes what begins in one, in the journal of the open step, and tells how it went."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys

    async def begin(self, hint: StepHint | ToolHint, token: str) -> None:
        """Note that the owner of `token` begins; nothing is noted for others."""
        keys = self._keys.script_keys(hint.run_id, None)
        given = (hint.run_id, hint.step, token, _index(hint))
        await run_script(self._connection, "tried", keys, *given)

    async def has_died(self, hint: StepHint | ToolHint) -> bool:
        """Return whether the last process of its own that began with it has died of it.

        One that let its step wait for tools, or handed it back, has not.
        """
        field = f"t:{_index(hint)}" if isinstance(hint, ToolHint) else "t"
        run = self._keys.run(hint.run_id)
        token = await self._connection.execute("HGET", f"{run}:journal", field)
        if not token:
            return False
        lost = await self._connection.execute("HGET", f"{run}:lost", token)
        return bool(lost) and LostAttempt.from_json(lost).kind == "crash"


def _index(hint: StepHint | ToolHint) -> int | str:
    return hint.index if isinstance(hint, ToolHint) else ""
