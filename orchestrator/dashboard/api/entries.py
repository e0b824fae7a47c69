"""What the audit keeps of a request and of its result: ids, names, counts and conditions. Pure.

Everybody who may look reads the audit, also where texts are hidden: of any other field it has the
name alone.
"""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from stepfleet.orchestrator.dashboard.api.records import ActionResult, Change, SubmissionResult
from stepfleet.orchestrator.limits.limit import Limit
from stepfleet.orchestrator.records import exact_json

CONDITIONS = ("status", "stop_reason", "agent", "batch", "tenant", "parent", "since")
CONDITIONS_OF_CALLS = ("agent", "tool", "batch", "tenant", "group", "key", "kind")
LONGEST_NAME = 80
"""Characters of a name, an id or a condition in the audit."""
MOST_IDS = 20
_CAUSE = re.compile(r"cause=[0-9A-Za-z_-]{1,80}")
_FIELD = re.compile(r"[a-z][a-z0-9_]{0,39}")
_GIVEN = ("name", "format", "agent", "id", "skip_invalid")
_OPTIONS = ("input_field", "id_field", "tenant", "priority")


def of_change(given: Change) -> str:
    """Return what is kept of an action's body."""
    kept: dict[str, Any] = {}
    if given.runs is not None:
        kept |= {"runs": len(given.runs), "ids": _ids(given.runs)}
    if given.filter is not None:
        kept["filter"] = conditions(given.filter, {*CONDITIONS, *CONDITIONS_OF_CALLS})
    if given.where is not None and _CAUSE.fullmatch(given.where):
        kept["where"] = given.where
    if given.at is not None:
        kept["at"] = given.at
    if given.overrides:
        kept["overrides"] = {
            name: value
            for name, value in given.overrides.items()
            if name in Limit.model_fields and isinstance(value, int | float)
        }
    texts = {"message": given.message, "where": given.where}
    fields = [name for name, value in texts.items() if value is not None and name not in kept]
    fields += [name for name in given.filter or {} if name not in kept["filter"]]
    fields += [name for name in given.overrides if name not in kept["overrides"]]
    return _text(kept, fields)


def of_file(given: Mapping[str, Any]) -> str:
    """Return what is kept of the parameters of a file of inputs."""
    named = {name: given[name] for name in _GIVEN}
    named |= {name: given["options"].get(name) for name in _OPTIONS}
    return _text({name: _cut(one) for name, one in named.items() if one not in (None, False)}, ())


def of_result(result: ActionResult | SubmissionResult) -> str:
    """Return what is kept of a result: the detail of some is a text, so of no action but a fork."""
    if isinstance(result, SubmissionResult):
        return result.to_json()
    kept: dict[str, Any] = {"runs": result.runs, "left_alone": result.left_alone}
    if result.outcome is not None:
        kept["outcome"] = result.outcome
    if result.action in ("fork", "set"):
        kept["detail"] = result.detail  # the new run's id, or the limit
    if result.refused:
        kept["refused"] = _ids(result.refused)
    return _text(kept, ())


def conditions(given: Mapping[str, str], known: Container[str]) -> dict[str, str]:
    """Return the conditions of a filter that are names or ids, cut."""
    return {name: _cut(value) for name, value in given.items() if name in known}


def _cut(value: Any) -> Any:
    return value[:LONGEST_NAME] if isinstance(value, str) else value


def _ids(ids: Iterable[str]) -> list[str]:
    return [one[:LONGEST_NAME] for one in list(ids)[:MOST_IDS]]


def _text(kept: Mapping[str, Any], hidden: Sequence[str]) -> str:
    """Return JSON, and the names of fields that are not kept; what is no name is counted."""
    names = [name for name in hidden if _FIELD.fullmatch(name)][:MOST_IDS]
    others = len(hidden) - len(names)
    said = [*names, *([f"{others} more"] if others else [])]
    return exact_json.text(kept) + (f" and {', '.join(said)}" if said else "")
