"""Commands that operate a fleet: up, flower, limits, cache."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.fleet import (
    DataFolder,
    known_redis,
    local_redis,
    print_found,
    warn_of,
)
from stepfleet.orchestrator.cli.model_check import check_models
from stepfleet.orchestrator.cli.options import DEFAULT_FLOWER_PORT, FLOWER_PORT
from stepfleet.orchestrator.cli.signals import Interrupts, until_interrupted
from stepfleet.orchestrator.cli.terminal import count, notice, seconds, shown
from stepfleet.orchestrator.cli.workers import (
    Child,
    FleetPlan,
    Simulated,
    simulated,
    supervisor_of,
    watched_argv,
)
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.dashboard.access import check_access
from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.limits.budgets import shown as number
from stepfleet.orchestrator.limits.limit import Limit, parsed_field
from stepfleet.orchestrator.models.caching import CacheStatistics
from stepfleet.orchestrator.settings.settings import Settings, load_settings
from stepfleet.orchestrator.store.dispatch import celery_app
from stepfleet.orchestrator.store.fleet.servers import redis_facts, refused_messages
from stepfleet.orchestrator.store.limits import BudgetUse, LimitUse, raised_by


def up(
    *,
    agents: options.AgentsRef,
    workers: options.Workers = 1,
    slots: options.Slots = None,
    with_flower: Annotated[bool, typer.Option("--flower", help="Start Flower as well.")] = False,
    simulation: Simulated,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Run a local fleet until Ctrl-C: Redis and workers.

    Commands in other terminals find it by the data folder, or by STEPFLEET_REDIS_URL.
    """
    plan = FleetPlan(agents, workers, slots, simulation.wanted())
    known = load_agents(agents)
    if plan.simulate is None:
        check_models([agent.config for agent in known.values()], os.environ)
    folder = DataFolder.prepare(data)
    lines = [
        f"{workers} worker(s) with {', '.join(sorted(known))}; logs in {folder.logs}",
        "Ctrl-C stops it. In another terminal: stepfleet submit FILE --agent NAME",
    ]
    if with_flower:
        lines.insert(1, f"Flower: http://127.0.0.1:{_flower_port()}")
    with local_redis(folder.root) as settings:
        warn_of(settings.store, prefix=settings.prefix)
        with _published_address(settings, folder):
            beside = [_flower(settings, folder)] if with_flower else []
            asyncio.run(_run(plan, settings, folder, beside, "\n".join(lines)))


def flower(
    port: Annotated[
        int,
        typer.Option(
            "--port", envvar=options.FLOWER_PORT, min=0, max=65_535, help="0: any free port."
        ),
    ] = options.DEFAULT_FLOWER_PORT,
    address: Annotated[str, typer.Option("--address", help="Where to listen.")] = "127.0.0.1",
    basic_auth: options.BasicAuth = None,
    flower_db: Annotated[
        Path | None,
        typer.Option(
            "--flower-db",
            envvar="STEPFLEET_FLOWER_DB",
            help="Keep the tasks in this file over restarts of Flower.",
        ),
    ] = None,
    content: Annotated[
        bool | None,
        typer.Option(
            "--content/--no-content",
            help="Show texts of models and tools to users with the password; else as the settings.",
            show_default=False,
        ),
    ] = None,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Run Flower on the fleet's broker: runs, batches, workers, costs, approvals.

    Listens on this machine only; another address needs --basic-auth. As in Flower itself, the
    HTTP API is open only with --basic-auth.
    """
    check_access(address, basic_auth)
    if flower_db is not None:
        _check_kept(flower_db)
    if find_spec("flower") is None:
        raise ConfigurationError('Flower is not installed: pip install "stepfleet[flower]"')
    # Imported here only: the modules need Flower.
    from stepfleet.orchestrator.dashboard.api.handling import Site  # noqa: PLC0415 - as above
    from stepfleet.orchestrator.dashboard.server import Address, serve  # noqa: PLC0415

    with known_redis(data) as settings:
        redis_facts(settings.store, prefix=settings.prefix)
        urls = {settings.store, settings.broker}
        serve(
            celery_app(settings),
            Address(address, port, basic_auth, flower_db),
            lambda url: notice(f"Flower: {url}"),
            lambda: asyncio.to_thread(refused_messages, urls, settings.prefix),
            Site.of(settings, content=content, is_local=basic_auth is None),
        )


cache = typer.Typer(no_args_is_help=True, help="Inspect and clear the response cache.")


@cache.command("stats")
def cache_stats(json: options.Json = False, data: options.Data = options.DATA_FOLDER) -> None:
    """Show entries, size, hits and misses of the response cache, in total and by model."""
    print_found(
        data,
        lambda fleet: fleet.cache.statistics(),
        statistics_picture,
        json=json,
        as_data=lambda found: {**found.to_dict(), "hit_rate": found.hit_rate},
    )


@cache.command("clear")
def cache_clear(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", help="Only this model's, provider:name."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", "-k", metavar="KEY", help="Only this entry, a step's cache.key."),
    ] = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Remove cached responses: all of them, one model's, or one entry."""
    print_found(
        data,
        lambda fleet: fleet.cache.clear(key=key, model=model),
        lambda dropped: f"{dropped:,} {'entry' if dropped == 1 else 'entries'} dropped",
        json=json,
        as_data=lambda dropped: {"dropped": dropped},
    )


_LOOK_SECONDS = 0.1


async def _run(
    plan: FleetPlan, settings: Settings, folder: DataFolder, beside: list[Child], started: str
) -> None:
    interrupts = Interrupts()
    with interrupts.handled():
        async with simulated(plan, folder) as extra:
            fleet = supervisor_of(plan, settings, folder, extra, notice, beside)
            interrupts.before_exit(fleet.kill)
            await fleet.start()
            try:
                await until_interrupted(
                    _stand(settings, fleet.workers, started), interrupts, fleet.watch()
                )
            finally:
                notice(f"Stopping: steps in progress may finish (up to {settings.drain:g} s).")
                await fleet.stop()


async def _stand(settings: Settings, workers: Sequence[Child], started: str) -> None:
    """Say that the fleet has `started` when all `workers` have announced their agents, and wait."""
    host = socket.gethostname()
    async with AsyncFleet(settings=settings) as client:
        while True:
            with contextlib.suppress(StoreError):
                alive = {one.process for one in (await client.overview()).workers if one.alive}
                if {f"{host}:{one.pid}" for one in workers} <= alive:
                    break
            await asyncio.sleep(_LOOK_SECONDS)
    notice(started)
    await asyncio.Event().wait()


@contextlib.contextmanager
def _published_address(settings: Settings, folder: DataFolder) -> Iterator[None]:
    """Keep a private server's URL, with its password, in a file that only its owner can read."""
    if load_settings().redis_url is not None:
        yield
        return
    path = folder.url_file
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(settings.store)
    notice(
        "Commands in this folder find the fleet by themselves; elsewhere first:\n"
        f"  export STEPFLEET_REDIS_URL=$(cat {path})"
    )
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _flower(settings: Settings, folder: DataFolder) -> Child:
    argv = watched_argv("stepfleet.orchestrator.cli", "flower")
    env = {**os.environ, "STEPFLEET_REDIS_URL": settings.store}
    return Child("flower", argv, env, folder.log("flower"))


def _flower_port() -> int:
    given = os.environ.get(FLOWER_PORT, "")
    return int(given) if given.isdigit() else DEFAULT_FLOWER_PORT


def _check_kept(path: Path) -> None:
    """Raise `ConfigurationError` for a file of tasks that is unsafe or cannot be written.

    Flower reads Python objects from it, which can be any code.
    """
    folder = path.absolute().parent
    if not os.access(folder, os.W_OK):
        raise ConfigurationError(f"--flower-db {path}: {folder} is not a folder you may write to")
    for one in (path, Path(f"{path}.db"), Path(f"{path}.dat")):
        if one.exists() and (one.is_dir() or one.stat().st_uid != os.geteuid()):
            msg = f"--flower-db {path}: {one} is not your file; name another one"
            raise ConfigurationError(msg)


Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="openai:gpt-4o-mini, 'openai:*', tenant:acme, 'batch:*', agent:clerk."
    ),
]


limits = typer.Typer(
    no_args_is_help=True,
    help="Show, set and clear limits of the whole fleet.",
)


@limits.command("show")
def limits_show(json: options.Json = False, data: options.Data = options.DATA_FOLDER) -> None:
    """Show the limits of the fleet, what is used of them, and how many steps wait."""
    print_found(
        data,
        lambda fleet: fleet.limits.use(),
        limits_picture,
        json=json,
        as_data=lambda found: [one.to_dict() for one in found],
    )


@limits.command("set")
def limits_set(
    name: Name,
    fields: Annotated[
        list[str],
        typer.Argument(
            metavar="FIELD=VALUE...",
            help="requests_per_minute=3000 in_flight=500; FIELD= ends one.",
        ),
    ],
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Set fields of a limit, for the whole fleet and at once."""
    given = dict(map(parsed_field, fields))
    print_found(
        data,
        lambda fleet: fleet.limits.set(name, **given),
        lambda limit: f"{name}: {limit_words(limit)}",
        json=json,
        as_data=lambda limit: {name: limit.model_dump(exclude_unset=True)},
    )


@limits.command("clear")
def limits_clear(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...")] = None,
    every: Annotated[bool, typer.Option("--all", help="Remove all limits.")] = False,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Remove limits: those named, or all."""
    if bool(names) == every:
        raise ConfigurationError("name the limits to remove, or pass --all")
    given = sorted(set(names or ()))

    async def clear(fleet: AsyncFleet) -> int:
        gone = await fleet.limits.clear(*given)
        if gone < len(given):
            named = f"there is no limit {given[0]!r}"
            if len(given) > 1:
                named = f"of {len(given):,} limits {len(given) - gone:,} did not exist"
            raise ConfigurationError(f"{named}; {gone:,} removed; stepfleet limits show has all")
        return gone

    print_found(
        data,
        clear,
        lambda gone: f"{gone:,} {'limit' if gone == 1 else 'limits'} removed",
        json=json,
        as_data=lambda gone: {"removed": gone},
    )


_NAME = 60
NONE = "no limits: stepfleet limits set openai:gpt-4o-mini requests_per_minute=3000"


def limit_words(limit: Limit | None) -> str:
    """Return a limit's fields in a line."""
    fields = limit.model_dump(exclude_unset=True) if limit else {}
    parts = [
        f"{name.replace('_', ' ')} {value if isinstance(value, str) else f'{value:,g}'}"
        for name, value in fields.items()
        if name != "learn"
    ]
    if fields.get("learn") is False:
        parts.append("learns nothing")
    return ", ".join(parts)


def _budget(name: str, use: BudgetUse) -> str:
    """Return in a line what there is of a budget."""
    held = f", {number(use.reserved)} reserved" if use.reserved else ""
    left = f"over by {number(use.over)}" if use.over else f"{number(use.left)} left"
    return (
        f"{use.field.replace('_', ' ')} of {shown(name, _NAME)}: {number(use.spent)} of "
        f"{number(use.budget)} spent{held}, {left}"
    )


def _learned(one: LimitUse) -> str:
    rates = (f"{name.replace('_', ' ')} {rate:,g}" for name, rate in one.learned.items())
    return f"learned: {', '.join(rates)}" if one.learned else ""


def limits_picture(found: list[LimitUse]) -> RenderableType:
    """Return a row per limit, and what the lines wait for."""
    if not found:
        return Text(NONE, style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("limit", "allows"):
        table.add_column(heading, overflow="fold")
    for heading in ("in flight", "waiting", "refused"):
        table.add_column(heading, justify="right", no_wrap=True)
    notes = []
    for one in found:
        style = "" if one.limit or one.learned else "dim"
        counts = (one.in_flight, one.waiting, one.refused)
        table.add_row(
            Text(shown(one.name, _NAME), style=style),
            Text("; ".join(filter(None, (limit_words(one.limit), _learned(one))))),
            *(Text(count(number)) for number in counts),
        )
        if one.cool_seconds:
            text = (
                f"{shown(one.name, _NAME)}: no calls for {seconds(one.cool_seconds)}, after a 429"
            )
            notes.append(Text(text, style="yellow"))
        notes += [Text(_budget(one.name, budget)) for budget in one.budgets]
        if one.waits_for:
            runs = "1 run waits" if one.waiting == 1 else f"{count(one.waiting)} runs wait"
            text = f"{runs} for {shown(one.waits_for, 120)}{shown(raised_by(one.waits_for), 200)}"
            notes.append(Text(text))
    return Group(table, *notes)


def statistics_picture(found: CacheStatistics) -> Table:
    """Return a table of the response cache: a row for each model, and one for all."""
    table = Table("model", "entries", "bytes", "hits", "misses", show_edge=False)
    for model, one in found.by_model.items():
        cells = (one.entries, one.bytes, one.hits, one.misses)
        table.add_row(shown(model, _NAME), *map(count, cells))
    cells = (found.entries, found.bytes, found.hits, found.misses)
    table.add_row("all", *map(count, cells))
    table.caption = f"{found.hit_rate:.0%} hits; room for {count(found.max_bytes)} bytes"
    return table
