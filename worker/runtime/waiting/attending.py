"""Looks after calls that wait for another run, or for a person: starts, checks, ends a wait."""

from collections.abc import Awaitable, Callable, Mapping

from stepfleet.orchestrator.protocol.waiting import TakenCall
from stepfleet.orchestrator.records.calls.answers import Awaited
from stepfleet.worker.ports import AgentCode

LOOK_AGAIN = 3600.0
"""Seconds after which a call is looked at again whose answer comes by itself: it may be lost."""
Attendant = Callable[[TakenCall, AgentCode], Awaitable[float]]
"""Does what such a call needs now, twice as well as once. Returns after how many seconds it is to
be looked at again; no more where it has its answer."""


class Attending:
    """Who looks after the calls that wait, by what they wait for."""

    def __init__(self, attendants: Mapping[Awaited, Attendant]) -> None:
        self._attendants = attendants

    async def __call__(self, taken: TakenCall, awaited: Awaited, agent: AgentCode) -> float:
        """Look after a call. Raises what its attendant raises."""
        attendant = self._attendants.get(awaited)
        return LOOK_AGAIN if attendant is None else await attendant(taken, agent)
