"""`stepfleet doctor`: reads the facts of a set-up, checks them, and prints the findings."""

import asyncio
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.cli.doctor import checks
from stepfleet.orchestrator.cli.doctor.checks import Check, State, fail, good
from stepfleet.orchestrator.cli.setup import preflight
from stepfleet.orchestrator.cli.setup.data_folder import known_redis
from stepfleet.orchestrator.cli.setup.open_files import open_files_limit
from stepfleet.orchestrator.cli.setup.redis_facts import is_redis, redis_facts, sentinel_facts
from stepfleet.orchestrator.cli.terminal.exit_codes import COMPLETED, USAGE
from stepfleet.orchestrator.cli.terminal.output import print_either
from stepfleet.orchestrator.errors import AgentException, StoreError
from stepfleet.orchestrator.redis_client.urls import is_sentinel
from stepfleet.orchestrator.settings.settings import Settings, load_settings
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.admission.limit_settings import LimitSettings
from stepfleet.orchestrator.store.embedded.binary import find_server_binary
from stepfleet.orchestrator.store.embedded.folder import Folder
from stepfleet.orchestrator.store.fleet.overview import FleetOverview, overview
from stepfleet.orchestrator.store.opening.opening import celery_app, open_store

_WORKER_MODULES = ("aiohttp", "greenlet", "yarl")
_PATIENCE_SECONDS = 3.0
_STYLES = {State.OK: "green", State.WARN: "yellow", State.FAIL: "red"}


def diagnose(agents: str | None, data: Path, *, json: bool) -> int:
    """Print all findings with their fixes; exit code 2 where a check fails."""
    found = list(_all(agents, data))
    print_either(found, table, json=json, as_data=lambda all_: [one.to_dict() for one in all_])
    return USAGE if any(check.state is State.FAIL for check in found) else COMPLETED


def table(found: Iterable[Check]) -> Table:
    """Return the findings as a table. Pure."""
    shown = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for check in found:
        text = Text(check.found)
        if check.fix:
            text.append(f"\nfix: {check.fix}", style="bold")
        shown.add_row(Text(check.state.value, style=_STYLES[check.state]), check.about, text)
    return shown


def _all(reference: str | None, data: Path) -> Iterator[Check]:
    yield checks.python(sys.version_info[:3])
    yield checks.libraries(
        metadata.requires("stepfleet") or [],
        {one.name.lower(): one.version for one in metadata.distributions() if one.name},
    )
    yield checks.worker_extra([name for name in _WORKER_MODULES if find_spec(name) is None])
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
    yield checks.variables(os.environ, Settings.model_fields, named)
    yield checks.open_files(open_files_limit(), settings.slots)
    if settings.redis_url is None and not Folder(data.expanduser().absolute()).has_data:
        yield _private_server()
        yield from _models(configs)
        return
    try:
        with known_redis(data) as used:
            yield from _store(used)
            seen, announced, problem = asyncio.run(_fleet(used))
            alive = [worker.name for worker in seen.workers if worker.alive]
            yield checks.workers(alive, seen.active, seen.troubles)
            yield from checks.queues(seen.unserved, used.queue)
            yield from checks.outages([str(one) for one in seen.outages])
            yield from checks.limits(problem, seen.limited)
            yield checks.agents([config.name for config in announced])
            configs = configs or announced
    except AgentException as error:
        yield fail("Redis", str(error), "see the message")
    yield from _models(configs)


def _store(settings: Settings) -> Iterator[Check]:
    facts = redis_facts(settings.store, prefix=settings.prefix)
    yield good("Redis", "answers, and takes the credentials")
    yield from checks.redis(facts.server)
    if facts.cluster:
        yield from checks.cluster(facts.cluster)
    if is_sentinel(settings.store):
        yield checks.sentinels(sentinel_facts(settings.store))
    yield checks.shards(facts, settings.shards)
    yield checks.quarantine(facts.quarantined, facts.refusals, settings.prefix)
    if settings.broker != settings.store:
        yield _broker(settings)
        yield from _broker_quarantine(settings)


async def _fleet(settings: Settings) -> tuple[FleetOverview, list[AgentConfig], str]:
    """Return the fleet's state, the agents of its workers, and what is wrong with its limits."""
    quick = settings.model_copy(update={"patience": _PATIENCE_SECONDS})
    opened = await open_store(quick)
    try:
        named = await opened.connection.execute("HGETALL", opened.keys.of(keys.NAMES))
        announced = [await opened.configs.load(named[name]) for name in sorted(named)]
        problem = ""
        try:
            await LimitSettings(opened.connection, opened.keys).read()
        except StoreError as error:
            problem = str(error)
        return await overview(opened), announced, problem
    finally:
        await opened.aclose()


def _broker_quarantine(settings: Settings) -> Iterator[Check]:
    """Judge a broker's own quarantine, where it is a Redis that answers."""
    with suppress(AgentException):
        if is_redis(settings.broker):
            facts = redis_facts(settings.broker, prefix=settings.prefix)
            yield replace(
                checks.quarantine(facts.quarantined, facts.refusals, settings.prefix),
                about="broker's quarantine",
            )


def _broker(settings: Settings) -> Check:
    app = celery_app(settings)
    try:
        with app.connection_for_write() as connection:
            shown = connection.as_uri()
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=5)
    except Exception as error:  # noqa: BLE001 - every transport has exceptions of its own
        fix = "start it, or correct STEPFLEET_BROKER_URL"
        return fail("broker", f"cannot be reached: {error}", fix)
    return good("broker", f"{shown} answers")


def _private_server() -> Check:
    try:
        binary = find_server_binary().path
    except AgentException as error:
        return fail("Redis", "none named, none to start", str(error))
    return good("Redis", f"none named: 'run' and 'up' start a private one ({binary})")


def _models(configs: Iterable[AgentConfig]) -> Iterator[Check]:
    """Judge key and address of each agent's model; no prompt is sent."""
    usable = []
    for config in (one for listed in configs for one in listed.by_model):
        try:
            preflight.target_of(config, os.environ)
        except AgentException as error:
            yield fail("model", str(error), "correct the address")
        else:
            usable.append(config)
    for agent, target, finding in preflight.examined(usable, os.environ):
        key = f", {target.key} is set" if target.key else ""
        yield (
            fail(finding.about, finding.found, finding.fix)
            if finding
            else good(f"model of {agent}", f"{target.base_url} answers{key}")
        )
