"""What grows and what does not: many waiting runs, long runs, long times, long histories, answers.

The large runs take their sizes from `LIMIT_RUNS`, `LIMIT_STEPS` and `SOAK_ROUNDS`; figures are
printed.
"""

import asyncio
import gzip
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis
from support.chaos.plan import SHORT
from support.chaos.run import scripted
from support.deadlines import until
from support.runs.stored_runs import Bench, bench
from support.servers.raw_model_server import RawModelServer, Script, endless, raw
from support.servers.redis_servers import RedisServer
from support.workers.load_fleet import load_fleet

from stepfleet.orchestrator import Agent, AsyncFleet, ConfigurationError, ModelSettings, tool
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.inline import InlineWorker
from stepfleet.worker.runtime.rescuer import Rescuer
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer
from stepfleet.worker.testing.service import RequestLog

AGENTS = Path(__file__).parent / "agent_modules" / "chaos_agents.py"
PLAIN = load_agents(str(AGENTS))["plain"]
MOST_BYTES_OF_A_RUN = 9000
MEGABYTE = 1024 * 1024
MOST_GROWTH = 150
Servers = Callable[..., RedisServer]

# A busy machine takes several times as long as one that has nothing else to do.
pytestmark = pytest.mark.timeout(420)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")


# ------------------------------------------------------------------------- many runs that wait


def commands_of(client: "redis.Redis") -> int:
    return int(client.info("stats")["total_commands_processed"])


def rescuer_of(desk: Bench) -> Rescuer:
    """Return one to which every queue is long."""
    opened = desk.opened
    return Rescuer(
        opened.connection,
        opened.keys,
        opened.dispatch,
        grace=1.0,
        interval=0.5,
        long_queue=10,
        jitter=lambda: 0.5,
    )


async def put_all_off(rescuer: Rescuer, client: "redis.Redis", runs: int) -> None:
    """Let the rescuer look until it has put off `runs` runs."""
    later = int(client.time()[0]) * 1000 + 10**9

    async def all_put_off() -> bool:
        assert await rescuer.rescue_all() == 0
        counted = [client.zcount(f"sf:{{s{n:02d}}}:due", later, "+inf") for n in range(16)]
        return sum(map(int, counted)) == runs

    await until(all_put_off, within=300, what="all runs put off")


async def cost_of_a_sweep(rescuer: Rescuer, client: "redis.Redis") -> int:
    """Return how many commands, those inside scripts among them, one sweep takes at least.

    A connection that was idle for long is looked after by a command of its own.
    """
    found = []
    for _ in range(3):
        before = commands_of(client)
        assert await rescuer.rescue_all() == 0
        found.append(commands_of(client) - before - 1)  # the INFO itself
    return min(found)


async def waiting(url: str, few: int, many: int) -> None:
    keys = [f"{SHORT} {number}" for number in range(many)]
    lines = [{"id": key, "input": key} for key in keys]
    settings = load_settings(redis_url=url, grace=1.0)
    async with AsyncFleet(settings=settings) as fleet, bench(url, grace=1.0) as desk:
        with redis.Redis.from_url(url, decode_responses=True) as client:
            rescuer = rescuer_of(desk)
            await fleet.submit_batch(lines[:few], agent=PLAIN)
            await put_all_off(rescuer, client, few)
            sweep_of_few = await cost_of_a_sweep(rescuer, client)
            used = int(client.info("memory")["used_memory"])
            began = time.monotonic()
            await fleet.submit_batch(lines[few:], agent=PLAIN)
            rate = (many - few) / (time.monotonic() - began)
            each = (int(client.info("memory")["used_memory"]) - used) / (many - few)
            await put_all_off(rescuer, client, many)
            sweep_of_many = await cost_of_a_sweep(rescuer, client)
    sys.stdout.write(
        f"\n{many} runs wait: submitted at {rate:.0f} runs/s, {each:.0f} bytes each in Redis; "
        f"commands of a sweep: {sweep_of_few} with {few} runs, {sweep_of_many} with {many}\n"
    )
    assert each < MOST_BYTES_OF_A_RUN
    assert sweep_of_many == sweep_of_few


async def test_runs_that_wait_cost_little_and_the_rescuer_nothing(redis_url: str) -> None:
    """DIST-10, DIST-15: bytes of a run are bounded; a sweep costs the same whatever waits."""
    await waiting(redis_url, 500, 5000)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
async def test_a_hundred_thousand_runs_can_wait(redis_url: str) -> None:
    """The same with many."""
    await waiting(redis_url, 1000, int(os.environ.get("LIMIT_RUNS", "100000")))


# --------------------------------------------------------------------------------- a long run


@tool(read_only=True, thread=False)
def look(what: str) -> str:
    """Look something up."""
    return f"seen {what}"


def tireless(steps: int) -> Agent:
    return Agent(
        "tireless",
        model="openai:gpt-4o-mini",
        tools=[look],
        max_steps=steps + 1,
        token_limit=None,
    )


class Written:
    """Notes how far the append-only file has grown when a turn begins."""

    def __init__(self, url: str, steps: int) -> None:
        self.at: dict[int, int] = {}
        self._steps = steps
        self._url = url

    def rules(self, request: RequestRecord) -> Reply:
        """Ask for a look in each turn but the last."""
        if request.turn % (self._steps // 5) == 0:
            with redis.Redis.from_url(self._url) as client:
                self.at[request.turn] = int(client.info("persistence")["aof_current_size"])
        if request.turn == self._steps:
            return Reply("done")
        return Reply(tool_calls=(ToolCallReply("look", {"what": f"{request.turn:06}"}),))

    def per_step(self, first: int, last: int) -> float:
        """Return the bytes that each step between two turns wrote."""
        return (self.at[last] - self.at[first]) / (last - first)


async def long_run(make: Servers, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    url = make(auto_aof_rewrite_percentage="0").url
    written = Written(url, steps)
    agent = tireless(steps)
    with ModelServer(written.rules, log=RequestLog(keep=0)) as model:
        monkeypatch.setenv("OPENAI_BASE_URL", model.url)
        settings = load_settings(redis_url=url)
        async with AsyncFleet(settings=settings) as fleet, InlineWorker(settings, [agent]) as here:
            run_id = await fleet.submit(agent, "go on")
            began = time.monotonic()
            await here.finish(run_id)
            seconds = time.monotonic() - began
            result = await fleet.runs.wait(run_id, timeout=30)
    early = written.per_step(steps // 5, 2 * steps // 5)
    late = written.per_step(4 * steps // 5, steps)
    sys.stdout.write(
        f"\n{steps} steps in {seconds:.0f} s: a step writes {early:.0f} bytes early, "
        f"{late:.0f} late\n"
    )
    assert len(result.steps) == steps
    assert late < 1.05 * early


async def test_a_late_step_writes_no_more_than_an_early_one(
    own_redis: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step writes is what it added, however long the run is."""
    await long_run(own_redis, 100, monkeypatch)


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_a_step_of_a_very_long_run_writes_no_more(
    own_redis: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same after 500 steps."""
    await long_run(own_redis, int(os.environ.get("LIMIT_STEPS", "500")), monkeypatch)


# ------------------------------------------------------------------------------- a long time


def soaked(make: Servers, effects: Path, rounds: int, runs: int, most: int) -> None:
    """Let a worker do `rounds` batches; behind the first third it grows by less than `most` MB."""
    resident: list[int] = []
    with (
        ModelServer(scripted(0.01), log=RequestLog(keep=0)) as model,
        load_fleet(make(), model, AGENTS, EFFECTS=str(effects)) as load,
    ):
        load.start()
        worker = psutil.Process(load.workers[0].pid)
        for number in range(rounds):
            keys = [f"{SHORT} {number}/{one}" for one in range(runs)]
            batch, _ = load.submit(PLAIN, keys)
            batch.wait(timeout=120 + runs / 20)
            resident.append(worker.memory_info().rss)
    settled = resident[len(resident) // 3]
    grown = (resident[-1] - settled) / MEGABYTE
    sys.stdout.write(
        f"\n{rounds} x {runs} runs: {settled / MEGABYTE:.0f} MB resident, grown by {grown:.1f} MB\n"
    )
    assert grown < most


def test_a_worker_does_not_grow_with_what_it_has_done(own_redis: Servers, effects: Path) -> None:
    soaked(own_redis, effects, rounds=6, runs=150, most=15)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_worker_does_not_grow_over_a_long_time(own_redis: Servers, effects: Path) -> None:
    """The same for long."""
    rounds = int(os.environ.get("SOAK_ROUNDS", "60"))
    soaked(own_redis, effects, rounds=rounds, runs=2000, most=25)


# ------------------------------------------------------------- long histories, endless answers


async def test_a_history_of_ten_thousand_messages_is_a_run_like_any(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent whole, in order; one that is too large is refused in words."""
    roles = ("user", "assistant")
    history = [{"role": roles[n % 2], "content": f"message {n}"} for n in range(9_999)]
    asked: list[int] = []

    def rules(request: RequestRecord) -> Reply:
        asked.append(len(request.messages))
        if len(asked) == 1:
            return Reply(tool_calls=(ToolCallReply("look", {"what": "it"}),))
        return Reply("done")

    agent = tireless(5)
    with ModelServer(rules) as model:
        monkeypatch.setenv("OPENAI_BASE_URL", model.url)
        settings = load_settings(redis_url=redis_url)
        async with AsyncFleet(settings=settings) as fleet, InlineWorker(settings, [agent]) as here:
            run_id = await fleet.submit(agent, history)
            await here.finish(run_id)
            result = await fleet.runs.wait(run_id, timeout=30)
            large = [{"role": "user", "content": "x" * 1000}] * 10_000
            with pytest.raises(
                ConfigurationError, match=r"'input' has .* bytes; the limit is .*: shorten"
            ):
                await fleet.submit(agent, large)
    assert result.output == "done"
    assert asked == [9_999, 10_001]


def begun(kind: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\n\r\n"


def streamed(piece: bytes) -> Script:
    """Begin a stream of events and never end it."""

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(begun(b"text/event-stream"))
        while not writer.is_closing():
            writer.write(piece)
            await writer.drain()

    return script


def inflating() -> Script:
    """Answer 100 MB that are packed into some 100 kB."""
    packed = gzip.compress(b'{"choices": "' + b" " * 100 * MEGABYTE)
    head = begun(b"application/json").removesuffix(b"\r\n") + b"Content-Encoding: gzip\r\n\r\n"
    return raw(head + packed)


EVENT = b'data: {"choices": [{"delta": {"content": "more"}}]}\n\n'
TOO_LONG = "the answer is longer than the limit of 16777216 B"
TOO_LATE = "no answer from 127.0.0.1 within 2 s (settings.timeout)"
ENDLESS = {
    "a body": (endless(), TOO_LONG),
    "events": (streamed(EVENT * 1000), TOO_LONG),
    "a line": (streamed(b"data: " + b"y" * 65_536), TOO_LONG),
    "a packed body": (inflating(), TOO_LONG),
    "nothing behind the head": (raw(begun(b"text/event-stream"), close=False), TOO_LATE),
    "silence": (raw(b"", close=False), TOO_LATE),
}


@pytest.mark.parametrize("answer", ENDLESS)
async def test_an_answer_without_end_is_a_clear_error(answer: str, redis_url: str) -> None:
    """The run says which limit ended it, and little of the answer was in memory at any time."""
    script, said = ENDLESS[answer]
    server = RawModelServer()
    server.answers(script)
    async with server.running():
        seconds = 2.0 if said is TOO_LATE else 300.0
        endpoint = ModelSettings(base_url=server.base_url, timeout=seconds)
        agent = Agent("asker", model="openai:gpt-4o-mini", settings=endpoint, model_attempts=1)
        settings = load_settings(redis_url=redis_url)
        async with AsyncFleet(settings=settings) as fleet, InlineWorker(settings, [agent]) as here:
            run_id = await fleet.submit(agent, "go on for ever")
            before = psutil.Process().memory_info().rss
            await here.finish(run_id)
            grown = (psutil.Process().memory_info().rss - before) / MEGABYTE
            result = await fleet.runs.wait(run_id, timeout=30)
    assert (result.error or "").endswith(said)
    assert grown < MOST_GROWTH
