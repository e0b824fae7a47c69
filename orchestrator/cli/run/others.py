"""Other batches with open runs: a command works on its own batch, so it pauses or names these.

In the data folder's private Redis, a batch that no command works on is paused before workers start:
its command was killed. Where workers of others are alive, or on a shared Redis, nothing is paused.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from stepfleet.orchestrator.cli.run.notes import Notes
from stepfleet.orchestrator.cli.terminal.format import count, shown
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.records.batch import BatchProgress

_LOOKED_AT = 200
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Advice:
    """How commands are written where the user is.

    `again` returns the command that goes on with a batch without a note; `data` is the option of
    the data folder, or empty.
    """

    again: Callable[[str], str]
    data: str = ""


async def settle_others(
    fleet: AsyncFleet,
    own: str,
    notes: Notes,
    advice: Advice,
    notice: Callable[[str], None],
    *,
    private: bool,
) -> None:
    """Pause what nobody works on, and name every other batch with open runs, but the `own`."""
    found = [one for one in await fleet.batches.newest(_LOOKED_AT) if one.open]
    others = [one for one in found if one.batch_id != own and not notes.is_worked_on(one.batch_id)]
    if not others:
        return
    alone = private and not any(one.alive for one in (await fleet.overview()).workers)
    if alone:
        for one in others:
            if one.paused < one.open or not one.sealed:
                await (await fleet.batches.get(one.batch_id)).pause()
    notice(_heading(len(others), alone=alone))
    for one in others[:_NAMED]:
        note = notes.read(one.batch_id)
        notice(_named(one, note.command if note else advice.again(one.batch_id), advice.data))
    if len(others) > _NAMED:
        notice(f"  and {len(others) - _NAMED} more: stepfleet status{advice.data}")


def _heading(number: int, *, alone: bool) -> str:
    what = "Another batch has" if number == 1 else f"{count(number)} other batches have"
    goes_on = "paused, this command does not run them" if alone else "workers may run them too"
    return f"{what} open runs ({goes_on}):"


def _named(one: BatchProgress, resume: str, data: str) -> str:
    name = f" {shown(one.name, 60)}" if one.name else ""
    lines = count(one.total - one.submitted)
    rest = "" if one.sealed else f"; {lines} lines are missing, which its first command submits"
    return (
        f"  {one.batch_id}{name}: {count(one.open)} of {count(one.total)} open{rest}\n"
        f"    resume: {resume}\n"
        f"    cancel: stepfleet cancel --batch {shlex.quote(one.batch_id)}{data}"
    )
