"""The runs that a new run waits for before it begins, checked."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepfleet.orchestrator.agents.prompt import worded
from stepfleet.orchestrator.batches.files.lines import check_before, parse_after_failed
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.protocol.fold import (
    COUNT,
    OUTPUT,
    OUTPUTS,
    check_data,
    check_places,
    places_of,
)
from stepfleet.orchestrator.records.calls.answers import After
from stepfleet.orchestrator.records.run.results import AgentRunResult
from stepfleet.orchestrator.tools.schemas.bounded_json import check_nesting

One = str | AgentRunResult
AfterRuns = One | Sequence[One] | Mapping[str, One]


def after_of(runs: AfterRuns | None, failed: Any, given: Any) -> After | None:
    """Return what a run waits for, with its input as `text` where that has places. Pure.

    Raises `ConfigurationError` that names the field.
    """
    failed = parse_after_failed(failed)
    if runs is None:
        return None
    names = _named(runs)
    check_before(len(names))
    if isinstance(given, Mapping):
        check_nesting(given, "input")
        check_data(given, places_of(names))
    if not isinstance(given, str):
        return After(runs=names, failed=failed)
    check_places(given, places_of(names), required=False)
    return After(runs=names, text=given, failed=failed)


def ids_of(runs: One | Sequence[One] | None) -> tuple[str, ...]:
    """Return the ids of runs that a whole batch waits for. Pure; raises as `after_of`."""
    if runs is None:
        return ()
    if isinstance(runs, Mapping):
        raise ConfigurationError(
            "field 'after': lines have their own inputs; list runs by their ids"
        )
    names = _named(runs)
    check_before(len(names))
    return tuple(names)


def _named(runs: AfterRuns) -> dict[str, str]:
    if isinstance(runs, Mapping):
        for name in runs:
            _check_name(name)
        return {name: _id(one) for name, one in runs.items()}
    is_one = isinstance(runs, str | AgentRunResult) or not isinstance(runs, Iterable)
    ids = [runs] if is_one else list(runs)
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
