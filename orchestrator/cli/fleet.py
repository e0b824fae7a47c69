"""The Redis of a command and its client: which one, where its files are, opened and closed."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from rich.console import RenderableType

from stepfleet.orchestrator.cli.options import called_as
from stepfleet.orchestrator.cli.terminal import notice, print_either
from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.settings.settings import Settings, load_settings
from stepfleet.orchestrator.store.embedded import EmbeddedRedis
from stepfleet.orchestrator.store.embedded.folder import Folder
from stepfleet.orchestrator.store.fleet.servers import RedisFacts, health_findings, redis_facts

if TYPE_CHECKING:
    from stepfleet.orchestrator.client.fleet import AsyncFleet

_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class DataFolder:
    """The files of one working directory's fleet: the private server, logs, resume notes."""

    root: Path

    @classmethod
    def prepare(cls, root: Path) -> "DataFolder":
        """Make the folder where it is missing.

        Raises `ConfigurationError` where it cannot be written.
        """
        place = Folder.prepare(root).root
        for name in ("logs", "batches"):
            (place / name).mkdir(mode=0o700, exist_ok=True)
        return cls(place)

    @property
    def logs(self) -> Path:
        """The folder of the processes' logs."""
        return self.root / "logs"

    def log(self, name: str) -> Path:
        """Return the path of a process's log."""
        return self.logs / f"{name}.log"

    @property
    def notes(self) -> Path:
        """The folder of the notes that let an interrupted `run` find its batch again."""
        return self.root / "batches"

    @property
    def url_file(self) -> Path:
        """The file (of its owner only) that holds the private server's URL while `up` runs."""
        return self.root / "redis-url"


@contextlib.contextmanager
def local_redis(root: Path, *, brief: bool = False) -> Iterator[Settings]:
    """Give the settings of the Redis to use; start the private server where none is configured."""
    settings = load_settings()
    if settings.redis_url is not None:
        yield settings
        return
    with EmbeddedRedis.start(root, brief=brief, say=notice) as server:
        yield load_settings(redis_url=server.url)


async def keep_private_server(
    root: Path, settings: Settings, notice: Callable[[str], None]
) -> None:
    """Start the data folder's server again whenever it has died; the caller uses it all the time.

    Ends only by raising `ConfigurationError`, where it cannot be started at its address.
    """
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        if await asyncio.to_thread(_is_listening, urlsplit(settings.store).port or 0):
            continue
        notice(f"The private Redis has died; starting it again. Its log: {root / 'redis.log.1'}")
        server = await asyncio.to_thread(EmbeddedRedis.start, root, say=notice)
        await asyncio.to_thread(server.stop)  # one of its users leaves; the caller stays
        if server.url != settings.store:
            msg = "the private Redis got another port; the same command resumes the batch"
            raise ConfigurationError(msg)
        notice("The private Redis is back: committed steps are kept, and the runs continue")


def _is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=_LOOK_SECONDS).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True  # it is slow, or this machine is
    return True


@contextlib.contextmanager
def known_redis(root: Path) -> Iterator[Settings]:
    """Give the settings of an existing Redis: the configured one, or the data folder's.

    Raises `ConfigurationError` where neither exists.
    """
    if load_settings().redis_url is None and not Folder(root.expanduser().absolute()).has_data:
        msg = (
            f"no Redis is named, and {root} holds no private server: set STEPFLEET_REDIS_URL, "
            "or start a fleet in this folder with 'stepfleet up --agents ...'"
        )
        raise ConfigurationError(msg)
    with local_redis(root, brief=True) as settings:
        yield settings


_PAUSE_SECONDS = 0.25


def warn_of(url: str, *, patience: float = 0.0, prefix: str = "") -> None:
    """Print warnings about a server that endangers runs. Raises as `redis_facts`."""
    for finding in health_findings(reach(url, patience=patience, prefix=prefix).server):
        notice(f"WARNING: {finding.text}")


def reach(url: str, *, patience: float = 0.0, prefix: str = "") -> RedisFacts:
    """Return the facts of a server, which is tried again for `patience` seconds, with a notice.

    Raises as `redis_facts`.
    """
    deadline = time.monotonic() + patience
    noticed = False
    while True:
        try:
            return redis_facts(url, prefix=prefix)
        except StoreError:
            if time.monotonic() >= deadline:
                raise
            if not noticed:
                notice(f"Redis cannot be reached; retrying for {patience:g} s.")
                noticed = True
            time.sleep(_PAUSE_SECONDS)


T = TypeVar("T")


def with_fleet(
    data: Path,
    work: Callable[["AsyncFleet"], Awaitable[T]],
    *,
    warn: bool = False,
    waits: bool = False,
) -> T:
    """Return what `work` returns for the fleet; `warn` prints a warning about an unsafe Redis.

    Work that `waits` for runs also waits for an absent Redis, for the settings' `patience`.
    Raises `ConfigurationError` or `StoreError`, with the fix, where there is no usable Redis.
    """
    with known_redis(data) as settings:
        # Checked either way: an unreachable Redis is reported with its fix within seconds.
        patience = settings.patience if waits else 0.0
        check = warn_of if warn else reach
        check(settings.store, patience=patience, prefix=settings.prefix)

        from stepfleet.orchestrator.client.audit import set_source  # noqa: PLC0415 - as below
        from stepfleet.orchestrator.client.fleet import AsyncFleet  # noqa: PLC0415 - not for workers

        set_source(called_as.get())

        async def opened() -> T:
            async with AsyncFleet(settings=settings) as fleet:
                return await work(fleet)

        return asyncio.run(opened())


def print_found(
    data: Path,
    read: Callable[["AsyncFleet"], Awaitable[T]],
    picture: Callable[[T], RenderableType],
    *,
    json: bool,
    as_data: Callable[[T], Any] = methodcaller("to_dict"),
) -> None:
    """Print what `read` returns for the fleet: its `picture`, or its data as JSON."""
    found = with_fleet(data, read)
    print_either(found, picture, json=json, as_data=as_data)
