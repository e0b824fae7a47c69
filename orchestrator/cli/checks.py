"""What a sound set-up looks like: each check judges one fact, and names the fix. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from stepfleet.orchestrator.cli.redis_facts import RedisFacts
from stepfleet.orchestrator.store.soundness import ServerFacts, worries

OLDEST_PYTHON = (3, 11)
BESIDE_SLOTS = 256
"""Open files that a worker needs apart from a connection per slot."""


class State(StrEnum):
    """How a check came out; only `FAIL` makes `doctor` fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `fix` is empty where nothing needs to be done."""

    about: str
    state: State
    found: str
    fix: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return the finding as JSON-ready data."""
        return {"check": self.about, "state": self.state, "found": self.found, "fix": self.fix}


def good(about: str, found: str) -> Check:
    """Return a check that is passed."""
    return Check(about, State.OK, found)


def python(version: tuple[int, ...]) -> Check:
    """Judge the interpreter."""
    text = ".".join(map(str, version[:3]))
    if version[:2] >= OLDEST_PYTHON:
        return good("Python", text)
    return Check("Python", State.FAIL, f"{text} is too old", "use Python 3.11 or newer")


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
        return good("libraries", "this installation does not say what it needs")
    if wrong:
        return Check("libraries", State.FAIL, "; ".join(wrong), "pip install --upgrade stepfleet")
    return good("libraries", ", ".join(sorted(seen)))


def worker_extra(missing: Sequence[str]) -> Check:
    """Judge whether this machine could run workers."""
    if not missing:
        return good("worker libraries", "installed")
    return Check(
        "worker libraries",
        State.WARN,
        f"no workers can run here: {', '.join(missing)} missing",
        'pip install "stepfleet[worker]", unless this machine only submits',
    )


def redis(facts: ServerFacts) -> list[Check]:
    """Judge the store's server."""
    worried = {one.about: one for one in worries(facts)}
    sound = {
        "version": f"version {facts.version or 'unknown'}",
        "durability": "append-only file is on" if facts.append_only else "does not say",
        "eviction": facts.eviction or "does not say",
    }
    return [
        Check(f"Redis {about}", State.FAIL, worried[about].found, worried[about].fix)
        if about in worried
        else good(f"Redis {about}", text)
        for about, text in sound.items()
    ]


def shards(facts: RedisFacts, wanted: int) -> Check:
    """Judge whether the settings agree with the store about its shards."""
    if facts.shards in (None, wanted):
        return good("shards", f"{wanted}" + ("" if facts.shards else " (the store is unused)"))
    return Check(
        "shards",
        State.FAIL,
        f"the store has {facts.shards}, the settings say {wanted}",
        f"set STEPFLEET_SHARDS={facts.shards}",
    )


def quarantine(count: int) -> Check:
    """Judge broker messages that nobody could read."""
    if not count:
        return good("quarantine", "empty")
    return Check(
        "quarantine",
        State.WARN,
        f"{count} broker messages could not be read and were put aside",
        "find out who else writes to the queue; redis-cli DEL sf:quarantine drops them",
    )


def workers(names: Sequence[str], waiting: int) -> Check:
    """Judge whether somebody does the work."""
    if names:
        return good("workers", f"{len(names)} alive: {', '.join(sorted(names)[:5])}")
    return Check(
        "workers",
        State.FAIL if waiting else State.WARN,
        f"none alive{f', and {waiting} runs wait' if waiting else ''}",
        "start one: stepfleet worker --agents MODULE (or stepfleet up)",
    )


def agents(names: Sequence[str]) -> Check:
    """Judge whether runs can be submitted by an agent's name."""
    if names:
        return good("agents", ", ".join(sorted(names)))
    return Check(
        "agents",
        State.WARN,
        "none known",
        "start a worker with --agents MODULE, or pass --agents to submit",
    )


def open_files(limit: int, slots: int) -> Check:
    """Judge the limit of open files (each model call under way holds one)."""
    needed = slots + BESIDE_SLOTS
    if limit < 0 or limit >= needed:
        return good("open files", "unlimited" if limit < 0 else f"limit {limit}")
    return Check(
        "open files",
        State.WARN,
        f"limit {limit}, and {slots} slots need about {needed}",
        f"ulimit -n {needed * 2} before starting workers (LimitNOFILE= in systemd), or --slots "
        "with a smaller number",
    )


def _fits(need: Requirement, have: str) -> bool:
    try:
        return need.specifier.contains(Version(have), prereleases=True)
    except InvalidVersion:
        return False
