"""The identity of the current step: a context variable that tasks, tools and threads share."""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.settings.settings import TASK, TOOL_TASK


@dataclass(frozen=True, slots=True)
class Identity:
    """A step of a run (from 1), its agent where it is claimed, and the Celery task."""

    run_id: str
    step: int
    agent: str = ""
    task_id: str = ""


_current: ContextVar[Identity | None] = ContextVar("stepfleet_step", default=None)


def current_step() -> Identity | None:
    """Return the step that this code works for; None outside of steps."""
    return _current.get()


def enter_task(
    name: str, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> None:
    """Set the step of a Celery task; a task of another kind, or without a step, has none."""
    given = [*args, *(kwargs or {}).values()]
    if name not in (TASK, TOOL_TASK) or len(given) < 2:  # noqa: PLR2004 - a run and a step
        _current.set(None)
        return
    run_id, step = given[:2]
    known = isinstance(run_id, str) and isinstance(step, int)
    _current.set(Identity(run_id, step + 1, task_id=task_id) if known else None)


def enter_step(claim: Claim) -> None:
    """Set the step that was claimed, and its agent."""
    known = _current.get()
    if known is None or known.run_id != claim.run_id:
        known = Identity(claim.run_id, claim.number)
    _current.set(replace(known, step=claim.number, agent=claim.config.name))
