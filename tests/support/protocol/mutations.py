"""Bugs seeded in copies of the scripts, for one search each."""

from typing import NamedTuple

from hypothesis import HealthCheck, Phase, settings
from support.protocol.pages import PAGED, paged

from stepfleet.orchestrator.store import lua

SEARCH = settings(
    max_examples=2_000,
    stateful_step_count=50,
    deadline=None,
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Mutation(NamedTuple):
    """In the script (or `common`), `old` becomes `new`."""

    script: str
    old: str
    new: str


def texts_with(mutation: Mutation) -> dict[str, str]:
    """Return the texts of all scripts, with the mutation where it belongs."""
    names = lua.scripts()
    texts = {name: lua.source(name) for name in names}
    if mutation.script == "page":
        texts |= paged({name: texts[name] for name in PAGED})
    is_shared = mutation.script == "common"
    affected = {name for name in names if mutation.old in texts[name]}
    affected = affected if is_shared else {mutation.script}
    assert affected, f"no script has {mutation.old!r} any more"
    for name in affected:
        assert texts[name].count(mutation.old) == 1, f"{name}: the mutation does not fit any more"
        texts[name] = texts[name].replace(mutation.old, mutation.new)
    return texts
