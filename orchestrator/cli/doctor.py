"""The whole of `stepfleet doctor`: reads the facts of a set-up, checks and prints them."""

import asyncio
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.agents.agent import PREFIX, prefix_of
from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.cli.fleet import known_redis
from stepfleet.orchestrator.cli.model_check import examined, missing_key, target_of
from stepfleet.orchestrator.cli.options import COMPLETED, USAGE
from stepfleet.orchestrator.cli.terminal import print_either, shown
from stepfleet.orchestrator.cli.watchdog import open_files_limit
from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.records.text.validation import meant
from stepfleet.orchestrator.settings.settings import Settings, load_settings
from stepfleet.orchestrator.store.embedded.folder import Folder
from stepfleet.orchestrator.store.embedded.server import find_server_binary
from stepfleet.orchestrator.store.fleet.checks import (
    Check,
    FleetRead,
    State,
    archive_place,
    fail,
    fleet_checks,
    good,
    read_fleet,
    server_checks,
    warn,
)
from stepfleet.orchestrator.store.store import open_store

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


_WORKER_MODULES = ("aiohttp", "greenlet", "yarl")
_PATIENCE_SECONDS = 3.0
_THERE = ", if its workers have the same"
_STYLES = {State.OK: "green", State.WARN: "yellow", State.FAIL: "red"}


def examine(agents: str | None = None, *, json: bool, data: Path) -> int:
    """Check the set-up, and name the fix for each problem. Sends no prompt."""
    found = list(_all(agents, data))
    print_either(found, table, json=json, as_data=lambda all_: [one.to_dict() for one in all_])
    return USAGE if any(check.state is State.FAIL for check in found) else COMPLETED


def table(found: Iterable[Check]) -> Table:
    """Return the findings as a table. Pure."""
    rows = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for check in found:
        text = Text(shown(check.found))  # workers tell names and versions, and anybody may be one
        if check.fix:
            text.append(f"\nfix: {shown(check.fix)}", style="bold")
        state = Text(check.state.value, style=_STYLES[check.state])
        rows.add_row(state, Text(shown(check.check)), text)
    return rows


def _all(reference: str | None, data: Path) -> Iterator[Check]:
    yield python(sys.version_info[:3])
    yield libraries(
        metadata.requires("stepfleet") or [],
        {one.name.lower(): one.version for one in metadata.distributions() if one.name},
    )
    yield worker_extra([name for name in _WORKER_MODULES if find_spec(name) is None])
    configs: list[AgentConfig] = []
    if reference:
        try:
            configs = [agent.config for agent in load_agents(reference).values()]
            yield good("agent module", ", ".join(sorted(one.name for one in configs)))
        except AgentException as error:
            yield fail("agent module", str(error), "correct it, then run doctor again")
    try:
        settings = load_settings()
    except AgentException as error:
        yield fail("settings", str(error), "correct the variable or stepfleet.toml")
        return
    named = [config.name for config in configs]
    is_here = bool(configs)
    yield variables(os.environ, Settings.model_fields, named)
    yield open_files(open_files_limit(), settings.slots)
    if settings.archive_url:
        yield asyncio.run(archive_place(settings))
    if settings.redis_url is None and not Folder(data.expanduser().absolute()).has_data:
        yield _private_server()
        yield from _models(configs, is_here=is_here)
        return
    try:
        with known_redis(data) as used:
            yield from server_checks(used)
            read = asyncio.run(_fleet(used))
            yield from fleet_checks(read, used.queue)
            configs = configs or list(read.agents)
    except AgentException as error:
        yield fail("Redis", str(error), "see the message")
    yield from _models(configs, is_here=is_here)


async def _fleet(settings: Settings) -> FleetRead:
    quick = settings.model_copy(update={"patience": _PATIENCE_SECONDS})
    opened = await open_store(quick)
    try:
        return await read_fleet(opened)
    finally:
        await opened.aclose()


def _private_server() -> Check:
    try:
        binary = find_server_binary().path
    except AgentException as error:
        return fail("Redis", "none named, none to start", str(error))
    return good("Redis", f"none named: 'run' and 'up' start a private one ({binary})")


def _models(configs: Iterable[AgentConfig], *, is_here: bool) -> Iterator[Check]:
    """Judge key and address of each agent's model; no prompt is sent.

    Unless the agents were named here, only workers call their models: these may have what is
    lacking here.
    """
    usable = []
    for config in (one for listed in configs for one in listed.by_model):
        try:
            target_of(config, os.environ)
        except AgentException as error:
            judge, there = (fail, "") if is_here else (warn, _THERE)
            yield judge("model", str(error), f"correct the address{there}")
        else:
            usable.append(config)
    for agent, target, finding in examined(usable, os.environ):
        key = f", {target.key} is set" if target.key else ""
        if finding is None:
            yield good(f"model of {agent}", f"{target.base_url} answers{key}")
        elif is_here:
            yield fail(finding.about, finding.found, finding.fix)
        elif missing_key(agent, target, os.environ):
            yield good(finding.about, f"{target.key} is not set here; its workers need it")
        else:
            yield warn(finding.about, finding.found, f"{finding.fix}{_THERE}")
