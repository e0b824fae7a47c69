"""`stepfleet doctor`: the whole check, or with --live a container's probe, which loads little."""

import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.options import COMPLETED, SOME_FAILED

_SECONDS = 1.0
"""How long each server may be silent."""


def doctor(
    agents: options.MaybeAgentsRef = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="Probe of a container: does a process of this host hang?"),
    ] = False,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Check the set-up, and name the fix for each problem. Sends no prompt.

    With --live only whether a worker or keeper of this host has reported to Redis within a lease:
    exit code 0 or 1. A Redis that is away is no reason to restart them: 0, with a warning.
    """
    if live:
        return probe()
    from stepfleet.orchestrator.cli.doctor import examine  # noqa: PLC0415 - the probe is quick

    return examine(agents, json=json, data=data)


def probe() -> int:
    """Print which processes of this host are alive, or why none is; return the exit code."""
    from stepfleet.orchestrator.errors import (  # noqa: PLC0415 - help loads nothing
        AgentException,
        StoreError,
    )
    from stepfleet.orchestrator.settings.settings import load_settings  # noqa: PLC0415 - as above
    from stepfleet.orchestrator.store.fleet.servers import query  # noqa: PLC0415 - as above

    try:
        settings = load_settings()
        read = partial(reported_here, settings.prefix, settings.lease)
        found = query(settings.store, read, seconds=_SECONDS)
    except StoreError as error:
        sys.stderr.write(f"nobody can tell, and workers wait for it: {error}\n")
        return COMPLETED
    except AgentException as error:
        sys.stderr.write(f"{error}\n")
        return SOME_FAILED
    if not found:
        sys.stderr.write(
            f"no worker or keeper of {socket.gethostname()} has reported within"
            f" {settings.lease:g} s (the lease): see its log\n"
        )
        return SOME_FAILED
    sys.stdout.write(f"{', '.join(found)} reported within {settings.lease:g} s\n")
    return COMPLETED


def reported_here(prefix: str, lease: float, client: Any) -> list[str]:
    """Return the living processes of this machine that have reported within `lease` seconds.

    Asks for those alone, by their ids, where the machine lists these: a fleet may be large.
    """
    from stepfleet.orchestrator.store.keys import KEEPERS, WORKERS  # noqa: PLC0415 - help loads none

    host = socket.gethostname()
    running: list[str] = []
    with suppress(OSError):
        ids = (one.name for one in Path("/proc").iterdir())
        running = [f"{host}:{one}" for one in ids if one.isdecimal()]
    now = client.time()
    seconds = float(next(iter(now.values()))[0] if isinstance(now, dict) else now[0])
    reports: dict[str, str] = {}
    for key in (prefix + WORKERS, prefix + KEEPERS):
        if running:
            values = client.hmget(key, running)
            reports |= {one: text for one, text in zip(running, values, strict=True) if text}
        else:
            reports |= client.hgetall(key)
    return sorted(
        one
        for one, text in reports.items()
        if one.startswith(f"{host}:") and seconds - _seen_at(text) <= lease
    )


def _seen_at(report: str) -> float:
    """Return the time of a report, in seconds since 1970 by Redis's clock; 0 if it has none."""
    with suppress(ValueError, TypeError, AttributeError):
        return float(orjson.loads(report).get("seen", 0))
    return 0.0
