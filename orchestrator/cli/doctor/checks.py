"""The checks of this machine: each judges one fact, and names the fix. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from stepfleet.orchestrator.agents.agent import PREFIX, prefix_of
from stepfleet.orchestrator.records.text.validation import meant
from stepfleet.orchestrator.store.fleet.checks import Check, fail, good, warn

OLDEST_PYTHON = (3, 11)
OURS = "STEPFLEET_"
OTHER_VARIABLES = (
    "STEPFLEET_AGENTS",
    "STEPFLEET_DATA",
    "STEPFLEET_NO_CHECK",
    "STEPFLEET_PRICING_CONFIG",
    "STEPFLEET_ALLOW_MODEL_REQUESTS",
    "STEPFLEET_FLOWER_BASIC_AUTH",
    "STEPFLEET_FLOWER_DB",
    "STEPFLEET_FLOWER_PORT",
)
"""Variables that are not settings."""
CRASH = "STEPFLEET_CRASH_"
"""Variables by which tests crash workers."""
BESIDE_SLOTS = 256
"""Open files that a worker needs apart from a connection per slot."""


def python(version: tuple[int, ...]) -> Check:
    """Judge the interpreter."""
    text = ".".join(map(str, version[:3]))
    if version[:2] >= OLDEST_PYTHON:
        return good("Python", text)
    return fail("Python", f"{text} is too old", "use Python 3.11 or newer")


def libraries(required: Sequence[str], installed: Mapping[str, str]) -> Check:
    """Judge the installed versions by what the package requires; extras are left out."""
    wrong, seen = [], []
    found = {canonicalize_name(name): version for name, version in installed.items()}
    for line in required:
        need = Requirement(line)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        have = found.get(canonicalize_name(need.name))
        if have is None:
            wrong.append(f"{need.name} is missing")
        elif not _fits(need, have):
            wrong.append(f"{need.name} is {have}, needed is {need.specifier}")
        else:
            seen.append(f"{need.name} {have}")
    if not required:
        return good("libraries", "the requirements of this installation are unknown")
    if wrong:
        return fail("libraries", "; ".join(wrong), "pip install --upgrade stepfleet")
    return good("libraries", ", ".join(sorted(seen)))


def worker_extra(missing: Sequence[str]) -> Check:
    """Judge whether this machine could run workers."""
    if not missing:
        return good("worker libraries", "installed")
    return warn(
        "worker libraries",
        f"no workers can run here: {', '.join(missing)} missing",
        'pip install "stepfleet[worker]", unless this machine only submits',
    )


def variables(
    environment: Mapping[str, str], settings: Iterable[str], agents: Iterable[str]
) -> Check:
    """Judge variables with our prefix; those of agents only where `agents` are known."""
    known = {f"{OURS}{name.upper()}" for name in settings} | {*OTHER_VARIABLES}
    prefixes = (*([prefix_of(name) for name in agents] or [PREFIX]), CRASH)
    ours = [name for name in sorted(environment) if name.startswith(OURS)]
    strange = [name for name in ours if name not in known and not name.startswith(prefixes)]
    if not strange:
        return good("variables", ", ".join(ours) or "none")
    names = [
        f"{name} (no agent of that name)" if name.startswith(PREFIX) else name + meant(name, known)
        for name in strange
    ]
    return warn(
        "variables",
        f"of no effect: {'; '.join(names)}",
        "correct or unset them; docs/configuration.md lists all; those of agents apply to agents "
        "from a .toml file (--agents) or builder_of",
    )


def open_files(limit: int, slots: int) -> Check:
    """Judge the limit of open files (each model call in progress holds one)."""
    needed = slots + BESIDE_SLOTS
    if limit < 0 or limit >= needed:
        return good("open files", "unlimited" if limit < 0 else f"limit {limit}")
    return warn(
        "open files",
        f"limit {limit}, and {slots} slots need about {needed}",
        f"ulimit -n {needed * 2} before starting workers (LimitNOFILE= in systemd), or --slots "
        "with a smaller number",
    )


def _fits(need: Requirement, have: str) -> bool:
    try:
        return need.specifier.contains(Version(have), prereleases=True)
    except InvalidVersion:
        return False
