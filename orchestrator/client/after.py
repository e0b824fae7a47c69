"""The runs that a new run waits for before it begins, checked."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from stepfleet.orchestrator.agents.prompt import worded
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.protocol.composing import COUNT, OUTPUT, OUTPUTS, check_places
from stepfleet.orchestrator.records.answers import After
from stepfleet.orchestrator.records.run.results import AgentRunResult
from stepfleet.orchestrator.store.batches.batches import Batches

MOST_BEFORE = 1_000
"""Runs that one run waits for."""
One = str | AgentRunResult
AfterRuns = One | Sequence[One] | Mapping[str, One]
AfterFailed = Literal["stop", "run"]


def after_of(runs: AfterRuns | None, failed: Any, given: Any) -> After | None:
    """Return what a run waits for, with its input as `text` where that has places. Pure.

    Raises `ConfigurationError` that names the field.
    """
    if failed not in ("stop", "run"):
        raise ConfigurationError(f"field 'after_failed' is {failed!r}; write 'stop' or 'run'")
    if runs is None:
        return None
    names = _named(runs)
    if not 1 <= len(names) <= MOST_BEFORE:
        msg = f"field 'after' names {len(names):,} runs; name 1 to {MOST_BEFORE:,}"
        raise ConfigurationError(f"{msg}, or let them follow each other")
    if not isinstance(given, str):
        return After(runs=names, failed=failed)
    check_places(given, places_of(names), required=False)
    return After(runs=names, text=given, failed=failed)


def places_of(names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the places that an input behind these runs may have. Pure."""
    return (*((OUTPUT,) if len(names) == 1 else ()), OUTPUTS, COUNT, *names)


async def ensure_there(batches: Batches, after: After) -> None:
    """Raise `ConfigurationError` for a run that is not there."""
    runs = list(dict.fromkeys(after.runs.values()))
    for run, status in zip(runs, await batches.statuses(runs), strict=True):
        if status is None:
            msg = f"field 'after': no run has the id {run!r}; ended runs are removed after the"
            raise ConfigurationError(f"{msg} retention time")


def _named(runs: AfterRuns) -> dict[str, str]:
    if isinstance(runs, Mapping):
        for name in runs:
            _check_name(name)
        return {name: _id(one) for name, one in runs.items()}
    ids = [runs] if isinstance(runs, str | AgentRunResult) else list(runs)
    return {_id(one): _id(one) for one in ids}


def _id(one: Any) -> str:
    found = one.run_id if isinstance(one, AgentRunResult) else one
    if not isinstance(found, str) or not 0 < len(found) <= 200:  # noqa: PLR2004 - any id of a run
        raise ConfigurationError(f"field 'after' has {ascii(found)[:70]}; name runs by their ids")
    return found


def _check_name(name: Any) -> None:
    text = ascii(name)[:70]
    try:
        is_place = isinstance(name, str) and worded(f"{{{name}}}", {name: "x"}) == "x"
    except (ConfigurationError, ValueError):
        is_place = False
    if not is_place or name in (OUTPUT, OUTPUTS, COUNT) or name != name.strip():
        msg = f"field 'after' has the name {text}, which is no place in an input"
        raise ConfigurationError(f"{msg}; write a word of your own, as 'facts'")
