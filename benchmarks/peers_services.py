"""Private servers that peers keep their state in: Redis, Postgres, Restate. New for each run.

Redis has its append-only file on (flushed each second). Postgres has its defaults: fsync and
synchronous_commit on. Restate has its defaults. All listen on the loopback only.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from peers_catalog import Service
from peers_environments import restate_program
from processes import ended, redis_server, until

from stepfleet.orchestrator.store.embedded.server import choose_port

POSTGRES_FOLDERS = "/usr/lib/postgresql/*/bin"
POSTGRES_USER = "postgres"
POSTGRES_REMEDY = "install it (apt-get install postgresql), or put initdb and postgres on PATH"
START_SECONDS = 60


@dataclass(frozen=True)
class Running:
    """A server: the address that a peer's script is given, and its process id (None: none)."""

    address: str
    pid: int | None


@contextlib.contextmanager
def service(name: Service | None, cache: Path) -> Iterator[Running]:
    """Run the server of that name for as long as the block lasts.

    Raises `LookupError` that says what to install where the program is missing.
    """
    if name is None:
        yield Running("", None)
    elif name == "redis":
        with redis_server() as (url, pid):
            yield Running(url, pid)
    elif name == "postgres":
        with postgres() as running:
            yield running
    else:
        with restate(restate_program(cache)) as running:
            yield running


@contextlib.contextmanager
def postgres() -> Iterator[Running]:
    """Run a new cluster with one database, under a user that Postgres accepts."""
    programs = postgres_programs()
    user = POSTGRES_USER if os.geteuid() == 0 else None
    port = choose_port(None, None)
    with tempfile.TemporaryDirectory(prefix="peers-pg-") as folder:
        data, log = Path(folder) / "data", Path(folder) / "log"
        if user:
            shutil.chown(folder, user)
        subprocess.run(
            [str(programs / "initdb"), "-D", str(data), "-U", POSTGRES_USER, "-A", "trust"],
            check=True,
            capture_output=True,
            user=user,
            cwd=folder,
        )
        at = ["-h", "127.0.0.1", "-p", str(port)]
        command = [str(programs / "postgres"), "-D", str(data), *at]
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [*command, "-k", folder],
                stdout=output,
                stderr=output,
                text=True,
                user=user,
                cwd=folder,
            )
            with ended(process):
                ready = [str(programs / "pg_isready"), "-q", *at]
                until(lambda: subprocess.run(ready, check=False).returncode == 0, START_SECONDS)
                name = f"postgresql://{POSTGRES_USER}@127.0.0.1:{port}/postgres"
                yield Running(name, process.pid)


def postgres_programs() -> Path:
    """Return the folder with Postgres's programs, the newest version's where there are several."""
    found = sorted(Path("/").glob(f"{POSTGRES_FOLDERS[1:]}/initdb"), key=_version)
    path = str(found[-1]) if found else shutil.which("initdb")
    if path is None:
        raise LookupError(f"no Postgres under {POSTGRES_FOLDERS}: {POSTGRES_REMEDY}")
    return Path(path).parent


@contextlib.contextmanager
def restate(program: str) -> Iterator[Running]:
    """Run a new single-node server; the address is a JSON list of ingress and admin."""
    node, ingress, admin = _ports(3)
    settings = {
        "RESTATE_BIND_ADDRESS": f"127.0.0.1:{node}",
        "RESTATE_INGRESS__BIND_ADDRESS": f"127.0.0.1:{ingress}",
        "RESTATE_ADMIN__BIND_ADDRESS": f"127.0.0.1:{admin}",
        "RESTATE_ADVERTISED_HOST": "127.0.0.1",
        "RESTATE_LISTEN_MODE": "tcp",
        "RESTATE_DISABLE_TELEMETRY": "true",
        "RESTATE_LOG_FILTER": "warn",
    }
    with (
        tempfile.TemporaryDirectory(prefix="peers-restate-") as folder,
        (Path(folder) / "log").open("w", encoding="utf-8") as output,
    ):
        process = subprocess.Popen(
            [program, "--no-logo", "--base-dir", folder, "--node-name", "peers"],
            env={**os.environ, **settings},
            stdout=output,
            stderr=output,
            text=True,
            cwd=folder,
        )
        with ended(process):
            urls = [f"http://127.0.0.1:{port}" for port in (ingress, admin)]
            health = [f"{urls[0]}/restate/health", f"{urls[1]}/health"]
            until(lambda: all(_healthy(url) for url in health), START_SECONDS)
            yield Running(json.dumps(urls), process.pid)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:  # noqa: S310 - our own
            return bool(answer.status == 200)  # noqa: PLR2004 - OK
    except (urllib.error.URLError, OSError):
        return False


def _ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(choose_port(None, None))
    return list(ports)


def _version(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.parent.parent.name.split(".") if part.isdigit())
