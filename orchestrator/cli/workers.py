"""Worker processes on this machine, and a simulated provider: started, supervised, ended."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import orjson
import typer

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.fleet import DataFolder, warn_of
from stepfleet.orchestrator.cli.options import USAGE
from stepfleet.orchestrator.cli.watchdog import raise_open_files_limit
from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.models.services import environment_of
from stepfleet.orchestrator.settings.settings import Settings, load_settings
from stepfleet.orchestrator.store.embedded.folder import Folder
from stepfleet.orchestrator.store.embedded.server import ServerReply
from stepfleet.orchestrator.store.embedded.server import ask as ask_private

WORKER = "stepfleet.worker"
KEEPER = "stepfleet.worker.runtime.keeper"
WATCHDOG = "stepfleet.orchestrator.cli.watchdog"
POOLS = ("asyncio", "prefork", "threads", "solo")
THREADS = 32
MOST_SLOTS = 100_000


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """A worker's agents, its steps at once, and its queues.

    `slots` None leaves the number to the settings; `pool` is Celery's name or `asyncio`. Without
    `queues` the worker serves the settings' queue of steps only. `autoscale` is Celery's `MAX,MIN`.
    """

    agents: str
    slots: int | None = None
    pool: str = "asyncio"
    name: str | None = None
    log_level: str = "INFO"
    queues: tuple[str, ...] = ()
    autoscale: str | None = None


def celery_arguments(plan: WorkerOptions) -> list[str]:
    """Return the arguments of Celery's worker command."""
    # Workers need not know each other: their common state is in the store.
    arguments = ["--loglevel", plan.log_level, "--without-gossip", "--without-mingle"]
    if plan.name:
        arguments += ["--hostname", plan.name if "@" in plan.name else f"{plan.name}@%h"]
    if plan.pool != "asyncio":
        arguments += ["--pool", plan.pool]
    if plan.queues:
        arguments += ["--queues", ",".join(plan.queues)]
    if plan.slots is not None:
        arguments += ["--concurrency", str(plan.slots)]
    if plan.autoscale is not None:
        arguments += ["--autoscale", plan.autoscale]
    return arguments


def worker_argv(plan: WorkerOptions) -> list[str]:
    """Return the command line of a worker without the watchdog."""
    return [sys.executable, "-m", WORKER, *celery_arguments(plan)]


def watched_argv(module: str, *arguments: str) -> list[str]:
    """Return the command line of `python -m module` that ends when its parent dies."""
    return [sys.executable, "-m", WATCHDOG, module, *arguments]


def worker_environment(
    plan: WorkerOptions, redis_url: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return a worker's environment: the parent's, with the worker's Redis, agents and slots.

    The address is passed here and never as an argument: it may hold a password.
    """
    own = {"STEPFLEET_REDIS_URL": redis_url, "STEPFLEET_AGENTS": plan.agents}
    if plan.slots is not None:
        own["STEPFLEET_SLOTS"] = str(plan.slots)
    return {**environment, **own}


def simulated_environment(base_url: str) -> dict[str, str]:
    """Return the variables that send model calls to a simulated provider, and nowhere else."""
    root = base_url.removesuffix("/v1")
    return {**environment_of(root), "STEPFLEET_ALLOW_MODEL_REQUESTS": "0"}


def slots_of(pool: str, wanted: int | None) -> int | None:
    """Return the slots of a worker with that pool; None leaves them to the settings.

    A thousand slots are cheap in one event loop only. Raises `ConfigurationError` for a pool
    that does not exist, or would lose or duplicate work.
    """
    if pool in ("gevent", "eventlet"):
        msg = (
            f"--pool {pool} is not supported: it never takes back the messages of a dead worker, "
            "and runs some twice; leave --pool out (1,000 steps at once in one process), or name "
            "prefork, threads or solo"
        )
        raise ConfigurationError(msg)
    if pool not in POOLS:
        raise ConfigurationError(f"--pool {pool} is unknown; name one of {', '.join(POOLS)}")
    if wanted is not None or pool == "asyncio":
        return wanted
    return {"prefork": os.cpu_count() or 1, "threads": THREADS, "solo": 1}[pool]


def checked_autoscale(given: str | None) -> str | None:
    """Return `MAX,MIN` as Celery takes it. Raises `ConfigurationError` for anything else."""
    if given is None:
        return None
    most, _, least = given.partition(",")
    if not most.strip().isdecimal() or not (least.strip() or "0").isdecimal():
        raise ConfigurationError("--autoscale takes MAX,MIN: the most and the least steps at once")
    if not 1 <= int(most) <= MOST_SLOTS or int(least.strip() or 0) > int(most):
        raise ConfigurationError(f"--autoscale {given}: MAX is 1 to {MOST_SLOTS:,}, MIN up to MAX")
    return f"{int(most)},{int(least.strip() or 0)}"


def tool_queues(agents: Iterable[Agent]) -> tuple[str, ...]:
    """Return the queues of the agents' tools, sorted."""
    return tuple(sorted({queue for agent in agents for queue in agent.queues}))


def named_queues(given: Iterable[str]) -> tuple[str, ...]:
    """Return the queues that `--queue` names: one each, or several with commas between.

    Raises `ConfigurationError` for an empty name.
    """
    names = [name.strip() for one in given for name in one.split(",")]
    if not all(names):
        raise ConfigurationError("--queue is empty: name a queue, as in --queue gpu")
    return tuple(dict.fromkeys(names))


_KEPT_LINES = 15


class Child:
    """A process with the parent-death watchdog, a log file, and no signals of the terminal."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self._argv = argv
        self.env = env
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """The process's id; 0 before its first start."""
        return self._process.pid if self._process else 0

    async def start(self, *, answers: bool = False) -> None:
        """Start it; with `answers` its standard output can be read here, and is not logged."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                env=dict(self.env),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE if answers else descriptor,
                stderr=descriptor,
                # Ctrl-C in the terminal is handled here and passed on.
                start_new_session=True,
            )
        finally:
            os.close(descriptor)

    async def first_line(self, *, within: float) -> str:
        """Return its first line of output; empty where it ended. Raises `TimeoutError`."""
        if self._process is None or self._process.stdout is None:
            return ""
        line = await asyncio.wait_for(self._process.stdout.readline(), within)
        return line.decode(errors="replace").strip()

    async def ended(self) -> int:
        """Wait for its end; return the exit code, negative for a signal."""
        return await self._process.wait() if self._process else 0

    async def stop(self, *, within: float) -> None:
        """End it with SIGTERM, and after `within` seconds with SIGKILL."""
        if self._process is None:
            return
        self.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), within)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def terminate(self) -> None:
        """Send it SIGTERM; on a second one, a worker releases its steps at once."""
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                self._process.terminate()

    @property
    def runs(self) -> bool:
        """Whether it has been started and has not ended, without waiting."""
        if self._process is None or self._process.returncode is not None:
            return False
        try:
            look = os.WEXITED | os.WNOWAIT | os.WNOHANG
            return os.waitid(os.P_PID, self._process.pid, look) is None
        except ChildProcessError:
            return False

    def kill(self) -> None:
        """End it at once, with the processes that it started."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(line for line in lines[-_KEPT_LINES:] if line.strip())


SERVER = "stepfleet.worker.testing"
_START_SECONDS = 20.0
_STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Simulated:
    """The rules of a simulated provider, the latency of its answers, and its share of faults."""

    rules: Annotated[
        str | None,
        typer.Option(
            "--simulate",
            metavar="RULES",
            help="Answer model calls by rules (file.py:name): no provider, key or network.",
        ),
    ] = None
    latency: Annotated[
        str | None,
        typer.Option(
            "--simulate-latency",
            metavar="SECONDS",
            help="Latency of simulated answers: 0.05, 0.2-1.5 (evenly), 1.0~0.5 (log-normal).",
        ),
    ] = None
    faults: Annotated[
        float | None,
        typer.Option(
            "--simulate-faults",
            metavar="SHARE",
            min=0,
            max=1,
            help="Share of simulated calls that fail and are retried, such as 0.05.",
        ),
    ] = None

    @property
    def arguments(self) -> list[str]:
        """The server's arguments."""
        given = ["--rules", self.rules or ""]
        if self.latency is not None:
            given.append(f"--latency={self.latency}")
        if self.faults is not None:
            given.append(f"--faults={self.faults}")
        return given

    @property
    def options(self) -> list[str]:
        """The options of a command that ask for it."""
        words = ["--simulate", self.rules or ""]
        if self.latency is not None:
            words += ["--simulate-latency", self.latency]
        if self.faults is not None:
            words += ["--simulate-faults", f"{self.faults:g}"]
        return words

    def wanted(self) -> Self | None:
        """Return it, or None without rules. Raises `ConfigurationError` for the rest of it then."""
        if self.rules is not None:
            return self
        for option, value in (
            ("--simulate-latency", self.latency),
            ("--simulate-faults", self.faults),
        ):
            if value is not None:
                raise ConfigurationError(f"{option} needs --simulate RULES, which answer the calls")
        return None


@contextlib.asynccontextmanager
async def simulation(
    simulated: Simulated, folder: DataFolder
) -> AsyncIterator[tuple[Child, dict[str, str]]]:
    """Run the server; give its process, and the environment of the workers that use it.

    Raises `ConfigurationError` with the server's output where it does not start.
    """
    log = folder.log("simulation")
    log.unlink(missing_ok=True)
    argv = watched_argv(SERVER, *simulated.arguments)
    child = Child("the simulated provider", argv, os.environ, log)
    await child.start(answers=True)
    try:
        line = ""
        with contextlib.suppress(TimeoutError):
            line = await child.first_line(within=_START_SECONDS)
        try:
            base_url = str(orjson.loads(line)["url"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            output = "\n".join(part for part in (line, child.log_tail()) if part)
            msg = f"--simulate {simulated.rules}: the simulated provider did not start:\n{output}"
            raise ConfigurationError(msg) from None
        yield child, simulated_environment(base_url)
    finally:
        await child.stop(within=_STOP_SECONDS)


QUICK_SECONDS = 10.0
QUICK_DEATHS = 4
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_BEYOND_DRAIN = 10.0
_RELEASE_SECONDS = 5.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often in a row a worker died soon after its start; decides on its next start. Pure."""

    quick_deaths: int = 0
    is_first: bool = True
    """Whether it has been started only once."""
    is_wrong: bool = False
    """Whether it said at its first start that settings or agents are wrong."""

    def after_death(self, lived_seconds: float, code: int = 0) -> "Restarts":
        """Return the count after one more death; a long life resets it.

        What is wrong with settings or agents is wrong however long the worker took to find it.
        """
        wrong = self.is_first and code == USAGE
        if lived_seconds >= QUICK_SECONDS and not wrong:
            return Restarts(is_first=False)
        return Restarts(self.quick_deaths + 1, is_first=False, is_wrong=wrong)

    @property
    def hopeless(self) -> bool:
        """Whether starting it again would not help."""
        return self.is_wrong or self.quick_deaths >= QUICK_DEATHS

    @property
    def pause(self) -> float:
        """Seconds to wait before the next start."""
        return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** max(0, self.quick_deaths - 1))


class Supervisor:
    """Several child processes that should all be running: `workers`, and others `beside` them.

    `drain` are the seconds that a stopping worker gives its steps; `stop` waits a little longer.
    """

    def __init__(
        self,
        workers: Sequence[Child],
        notice: Callable[[str], None],
        *,
        drain: float,
        beside: Sequence[Child] = (),
    ) -> None:
        self.workers = tuple(workers)
        self._children = (*workers, *beside)
        self._notice = notice
        self._bound = drain + _BEYOND_DRAIN

    async def start(self) -> None:
        """Start all of them."""
        for child in self._children:
            await child.start()

    async def watch(self) -> None:
        """Restart dead ones; ends only by raising `ConfigurationError` with the log's tail."""
        async with asyncio.TaskGroup() as group:
            for child in self._children:
                group.create_task(self._keep(child))
            await asyncio.Event().wait()

    async def stop(self) -> None:
        """End all of them cleanly, and by force those that take longer than the drain."""
        await asyncio.gather(*(child.stop(within=self._bound) for child in self._children))

    def kill(self) -> None:
        """End all of them at once: a few seconds to release their steps, and then by force.

        Signals are repeated: a worker may not have received the first one yet, and two signals
        that arrive together are one.
        """
        deadline = time.monotonic() + _RELEASE_SECONDS
        while time.monotonic() < deadline and any(child.runs for child in self._children):
            for child in self._children:
                child.terminate()
            time.sleep(_POLL_SECONDS)
        for child in self._children:
            child.kill()

    async def _keep(self, child: Child) -> None:
        restarts = Restarts()
        while True:
            started = time.monotonic()
            code = await child.ended()
            restarts = restarts.after_death(time.monotonic() - started, code)
            if restarts.hopeless:
                times = "" if restarts.quick_deaths == 1 else f" {restarts.quick_deaths} times"
                msg = (
                    f"{child.name} ended{times} right after its start "
                    f"({_how(code)}). Its log ({child.log}) ends with:\n{child.log_tail()}"
                )
                raise ConfigurationError(msg)
            self._notice(
                f"{child.name} {_how(code)}; restarting it in {restarts.pause:g} s. "
                f"Its unfinished steps are repeated. Log: {child.log}"
            )
            await asyncio.sleep(restarts.pause)
            await child.start()


def _how(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The parts of a local fleet."""

    agents: str
    workers: int
    slots: int | None = None
    simulate: Simulated | None = None


@contextlib.asynccontextmanager
async def simulated(plan: FleetPlan, folder: DataFolder) -> AsyncIterator[dict[str, str]]:
    """Run the plan's simulated provider, if any; give the environment of workers that use it."""
    if plan.simulate is None:
        yield {}
        return
    async with simulation(plan.simulate, folder) as (_, environment):
        yield environment


def supervisor_of(
    plan: FleetPlan,
    settings: Settings,
    folder: DataFolder,
    extra: Mapping[str, str],
    notice: Callable[[str], None],
    beside: Sequence[Child] = (),
) -> Supervisor:
    """Return the supervisor of the plan's workers and of the processes `beside` them, not started.

    `extra` is added to the workers' environment.
    """
    heavy = tool_queues(load_agents(plan.agents).values()) if plan.workers else ()
    queues = (settings.queue, *heavy) if heavy else ()
    workers = []
    for name in (f"worker-{number + 1}" for number in range(plan.workers)):
        own = WorkerOptions(
            plan.agents,
            slots=plan.slots,
            # The process id keeps node names apart when several commands share one Redis.
            name=f"{name}-{os.getpid()}",
            # A log that nobody watches live need not have two lines for every step.
            log_level="WARNING",
            queues=queues,
        )
        argv = watched_argv(WORKER, *celery_arguments(own))
        env = worker_environment(own, settings.store, {**os.environ, **extra})
        if settings.metrics_port is None:
            env["STEPFLEET_METRICS_PORT"] = "0"  # no open port in a local fleet, unless asked for
        workers.append(Child(name, argv, env, folder.log(name)))
    return Supervisor(workers, notice, drain=settings.drain, beside=beside)


def worker(
    agents: options.AgentsRef,
    *,
    slots: options.Slots = None,
    pool: Annotated[
        str,
        typer.Option("--pool", "-P", help="asyncio (made for steps), prefork, threads or solo."),
    ] = "asyncio",
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "-c", min=1, help="The same as --slots; Celery's name."),
    ] = None,
    autoscale: Annotated[
        str | None,
        typer.Option(metavar="MAX,MIN", help="Steps at once: as many as needed within these."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", "-n", help="Node name, unique.")] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option(
            "--queue",
            "-Q",
            metavar="NAME",
            help="Serve this queue of tools instead of steps; repeat it, or use commas.",
        ),
    ] = None,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Run one Celery worker in the foreground, until SIGTERM or Ctrl-C."""
    plan = WorkerOptions(
        agents,
        slots_of(pool, concurrency or slots),
        pool,
        # The process id stays: several workers of a machine have names of their own.
        name or f"worker-{os.getpid()}",
        queues=named_queues(queue or ()),
        autoscale=checked_autoscale(autoscale),
    )
    load_agents(agents)
    url = _redis_url(data)
    with contextlib.suppress(StoreError):  # the worker says that it waits for a Redis that is away
        warn_of(url, prefix=load_settings().prefix)
    raise_open_files_limit()
    argv = worker_argv(plan)
    sys.stdout.flush()
    os.execve(argv[0], argv, worker_environment(plan, url, os.environ))  # noqa: S606 - no shell


def keeper(
    *,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Serves /live, /ready, /scale, /metrics; 0: any.")
    ] = 9460,
    host: Annotated[str, typer.Option(help="The address to serve at.")] = "127.0.0.1",
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Run a keeper in the foreground: all that workers do beside steps, without slots."""
    url = _redis_url(data)
    argv = [sys.executable, "-m", KEEPER, "--host", host, "--port", str(port)]
    sys.stdout.flush()
    environment = {**os.environ, "STEPFLEET_REDIS_URL": url}
    os.execve(argv[0], argv, environment)  # noqa: S606 - no shell


def _redis_url(data: Path) -> str:
    """Return the configured Redis, or the data folder's private one where it is running.

    A worker does not start a private one, which would outlive it.
    """
    settings = load_settings()
    if settings.redis_url is not None:
        return settings.store
    address = Folder(data.expanduser().absolute()).read_address()
    if address is None or ask_private(address) is not ServerReply.READY:
        msg = (
            "no Redis is named, and no fleet runs in this folder: set STEPFLEET_REDIS_URL, or "
            "start one with 'stepfleet up --agents ...'"
        )
        raise ConfigurationError(msg)
    return address.url
