"""The checks of a set-up: each judges one fact, and names the fix. Pure."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from stepfleet.orchestrator.agents.layers import PREFIX, prefix_of
from stepfleet.orchestrator.cli.setup.cluster_facts import ClusterFacts
from stepfleet.orchestrator.cli.setup.redis_facts import RedisFacts, SentinelFacts
from stepfleet.orchestrator.client.watching.standstill import serving
from stepfleet.orchestrator.records.text.validation import meant
from stepfleet.orchestrator.store.admission.lines import LimitState
from stepfleet.orchestrator.store.fleet.health import ServerFacts, health_findings

OLDEST_PYTHON = (3, 11)
ENOUGH_SENTINELS = 3
OURS = "STEPFLEET_"
OTHER_VARIABLES = (
    "STEPFLEET_AGENTS",
    "STEPFLEET_DATA",
    "STEPFLEET_PRICING_CONFIG",
    "STEPFLEET_ALLOW_MODEL_REQUESTS",
    "STEPFLEET_FLOWER_BASIC_AUTH",
    "STEPFLEET_FLOWER_DB",
    "STEPFLEET_FLOWER_PORT",
)
"""Variables that are not settings."""
CRASH = "STEPFLEET_CRASH_"
"""Variables by which tests crash workers."""
REASONS = 3
"""Reasons of refused messages that are listed."""
LONG_PAUSE = 60.0
"""Seconds for which a model refuses calls until that is worth a word."""
BESIDE_SLOTS = 256
"""Open files that a worker needs apart from a connection per slot."""


class State(StrEnum):
    """The outcome of a check; only `FAIL` makes `doctor` fail."""

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
    """Return a passed check."""
    return Check(about, State.OK, found)


def warn(about: str, found: str, fix: str) -> Check:
    """Return a warning."""
    return Check(about, State.WARN, found, fix)


def fail(about: str, found: str, fix: str) -> Check:
    """Return a failed check."""
    return Check(about, State.FAIL, found, fix)


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


def redis(facts: ServerFacts) -> list[Check]:
    """Judge the store's server."""
    worried = {one.about: one for one in health_findings(facts)}
    sound = {
        "version": f"version {facts.version or 'unknown'}",
        "durability": "append-only file is on" if facts.append_only else "does not say",
        "eviction": facts.eviction or "does not say",
        "memory": "does not say" if facts.full is None else "has room",
        "disk": "does not say" if facts.writes is None else "takes data",
    }
    return [
        fail(f"Redis {about}", worried[about].found, worried[about].fix)
        if about in worried
        else good(f"Redis {about}", text)
        for about, text in sound.items()
    ]


def cluster(facts: ClusterFacts) -> list[Check]:
    """Judge a cluster: whether it serves all slots, and survives the death of a master."""
    nodes = f"{facts.masters} masters, {facts.replicas} replicas"
    spread = ", ".join(map(str, sorted(facts.shards, reverse=True)))
    found = [good("cluster", nodes), good("cluster's shards", f"on the masters: {spread}")]
    if not facts.sound or facts.unserved:
        fix = "bring its masters back, or promote their replicas (redis-cli --cluster check)"
        lacks = f"{facts.unserved} slots are not served" if facts.unserved else "it is down"
        found[0] = fail("cluster", f"{nodes}; {lacks}", fix)
    elif facts.alone:
        fix = "give each master a replica (redis-cli --cluster add-node ... --cluster-slave)"
        lacks = f"no replica has {', '.join(facts.alone)}: while it is down its runs wait"
        found[0] = warn("cluster", f"{nodes}; {lacks}", fix)
    if 0 in facts.shards:
        fix = "a store with more shards (STEPFLEET_SHARDS=256 before its first use) spreads better"
        found[1] = warn("cluster's shards", f"on the masters: {spread}", fix)
    if facts.moving:
        what = f"{facts.moving} slots are migrating: runs in them wait until that is done"
        fix = "wait; if it is stuck: redis-cli --cluster fix HOST:PORT"
        found.append(warn("cluster's slots", what, fix))
    return found


def sentinels(facts: SentinelFacts) -> Check:
    """Judge whether a failover can happen."""
    found = f"{facts.answering} of {facts.named} answer, {facts.replicas} replicas"
    if facts.answering < facts.named:
        fix = "start them, or take them out of STEPFLEET_REDIS_URL"
        return warn("Sentinels", found, fix)
    if facts.known < ENOUGH_SENTINELS or facts.quorum > facts.known:
        what = f"{found}; {facts.known} watch the master, {facts.quorum} must agree"
        fix = "run three or more on different machines, with a quorum of a majority"
        return warn("Sentinels", what, fix)
    if not facts.replicas:
        fix = "start a replica: without one there is nothing to fail over to"
        return warn("Sentinels", found, fix)
    return good("Sentinels", found)


def shards(facts: RedisFacts, wanted: int) -> Check:
    """Judge whether settings and store have the same number of shards."""
    if facts.shards in (None, wanted):
        return good("shards", f"{wanted}" + ("" if facts.shards else " (the store is unused)"))
    return fail(
        "shards",
        f"the store has {facts.shards}, the settings say {wanted}",
        f"set STEPFLEET_SHARDS={facts.shards}",
    )


def quarantine(count: int, reasons: Mapping[str, int] | None = None, prefix: str = "") -> Check:
    """Judge broker messages that were refused; `reasons` counts them by reason."""
    if not count:
        return good("quarantine", "empty")
    causes = [f"{why} ({often}x)" for why, often in (reasons or {}).items()]
    shown = "; ".join([*causes[:REASONS], *(["and others"] if len(causes) > REASONS else [])])
    return warn(
        "quarantine",
        f"{count} broker messages were refused and put aside" + (f": {shown}" if shown else ""),
        "find out who else writes to the queue, and whether all have the same signing keys; "
        f"redis-cli DEL {prefix}sf:quarantine drops them",
    )


def outages(found: Sequence[str]) -> Iterator[Check]:
    """Judge the services of models: those that are out for the whole fleet."""
    for text in found:
        fix = (
            "start it, or wait: it is probed every minute; docs/providers.md#services-that-are-out"
        )
        yield warn("model service", text, fix)


def limits(problem: str, found: Sequence[LimitState]) -> Iterator[Check]:
    """Judge the limits for which runs wait: that is what they are for, but for a long pause.

    `problem` is why they cannot be read, if they cannot.
    """
    if problem:
        yield fail("limits", problem, "until then its runs wait: stepfleet limits set, or clear")
    for one in found:
        if one.cool_seconds > LONG_PAUSE:
            fix = (
                "the provider has asked for this pause: look at the account's quota there; "
                f"stepfleet limits clear {shlex.quote(one.name)} ends it"
            )
            yield warn("limits", str(one), fix)
        else:
            yield good("limits", str(one))


def workers(names: Sequence[str], waiting: int, troubles: Sequence[str] = ()) -> Check:
    """Judge whether workers are running; they cannot report while a server has `troubles`."""
    if names:
        return good("workers", f"{len(names)} alive: {', '.join(sorted(names)[:5])}")
    if troubles:
        return warn("workers", f"unknown: {'; '.join(troubles)}", "see above")
    return (fail if waiting else warn)(
        "workers",
        f"none alive{f', and {waiting} runs wait' if waiting else ''}",
        "start one: stepfleet worker --agents MODULE (or stepfleet up)",
    )


def queues(unserved: Mapping[str, int], steps: str) -> list[Check]:
    """Judge queues that no worker serves: `steps` is for steps, the others are for tools."""
    return [
        (fail if waiting else warn)(
            f"queue {queue}",
            f"no running worker serves it: {_waits(queue, waiting, steps)}",
            f"start one: {serving(queue, steps)}",
        )
        for queue, waiting in unserved.items()
    ]


def _waits(queue: str, waiting: int, steps: str) -> str:
    runs = "1 run waits" if waiting == 1 else f"{waiting} runs wait"
    if queue == steps:
        return f"{runs} for a step" if waiting else "steps would wait"
    return f"{runs} for a tool there" if waiting else "calls of the tools there would wait"


def agents(names: Sequence[str]) -> Check:
    """Judge whether runs can be submitted by an agent's name."""
    if names:
        return good("agents", ", ".join(sorted(names)))
    return warn(
        "agents",
        "none known",
        "start a worker with --agents MODULE, or pass --agents to submit",
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
