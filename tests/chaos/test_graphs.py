"""Graphs over results, hand-offs and a schedule while workers are killed: all whole, nothing twice.

The large size is `CHAOS_NODES` (300), with `CHAOS_KILLS` (20); it prints figures.
"""

import asyncio
import hashlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Literal, Self

import orjson
import pytest
import redis
from support.chaos.recount import check_linked_runs
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer, short_folder
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import AgentRunResult, AsyncFleet, Batch, Fleet, RunStatus
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.batches.scheduling import key_of, tick_id, ticks_after
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.store.batches.batches import id_of_keyed_batch, run_id_of
from stepfleet.orchestrator.store.keys import FOLLOW_UPS, SCHEDULE_TURNS, Keys
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, FaultKind, Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

FILE = Path(__file__).parent / "agent_modules" / "graph_agents.py"
AGENTS = load_agents(str(FILE))
NODE, FRONT = AGENTS["node"], AGENTS["front"]
ENDS = 900.0
NAME = "ticks"
NINTH = 9
"""Of so many nodes the model refuses one."""
PAID = frozenset({"replied", "disconnected", "content_filter"})

pytestmark = pytest.mark.timeout(2 * ENDS)


Rule = Literal["stop", "run"]


@dataclass(frozen=True)
class Size:
    """How much is done: nodes of the graph, lines to be reduced by pages, hand-offs, ..."""

    workers: int
    nodes: int
    lines: int
    page: int
    handed: int
    per_tick: int
    ticks: int
    kills: int
    seed: int

    @classmethod
    def large(cls) -> Self:
        """Return the size that the environment says."""
        nodes = int(os.environ.get("CHAOS_NODES", "300"))
        kills = int(os.environ.get("CHAOS_KILLS", "20"))
        seed = int(os.environ.get("CHAOS_SEED", "1"))
        return cls(4, nodes, 2 * nodes, 20, nodes // 5, nodes // 5, 3, kills, seed)


@dataclass(frozen=True)
class Node:
    """A run of the graph: it waits for earlier ones."""

    number: int
    after: tuple[int, ...]
    after_failed: Rule

    @property
    def text(self) -> str:
        """Its input, as it is submitted."""
        return f"node {self.number}: {{outputs}}" if self.after else f"node {self.number}"


def graph(count: int, draw: random.Random) -> list[Node]:
    """Return nodes, each of which follows up to five earlier ones in any order."""
    nodes = []
    for number in range(count):
        before = draw.sample(range(number), min(number, draw.choice((0, 1, 1, 2, 3, 5))))
        rule: Rule = "run" if draw.random() < 0.6 else "stop"
        nodes.append(Node(number, tuple(before), rule))
    return nodes


def rules(request: RequestRecord) -> Reply | Fault:
    """Answer by the first word of the question."""
    kind, _, rest = request.question.partition(" ")
    if kind == "front" and request.turn == 1:
        call = ToolCallReply("transfer_to_back", {"reason": "it is theirs"})
        return Reply(tool_calls=(call,), latency=0.02)
    if kind == "node" and fails(rest):
        return Fault(FaultKind.CONTENT_FILTER)
    if kind == "reduce":
        numbers = (int(one["output"]) for one in orjson.loads(rest))
        return Reply(str(sum(numbers)), latency=0.02)
    return Reply("1" if kind == "map" else answer(request.question), latency=0.02)


def fails(rest: str) -> bool:
    """Tell whether the model refuses a node."""
    return int(rest.partition(":")[0]) % NINTH == 1


def answer(question: str) -> str:
    """Return a text of some length that no other question has, nor this one cut or in disorder."""
    digest = hashlib.sha256(question.encode()).hexdigest()
    return f"{digest} {{and}} braces " * (1 + int(digest[:2], 16) // 4)


class Play:
    """A fleet whose workers are killed while graphs, hand-offs and ticks are under way."""

    def __init__(self, size: Size, server: RedisServer, model: ModelServer, folder: Path) -> None:
        self.size, self.url = size, server.url
        self.kills = 0
        self._draw = random.Random(size.seed)
        self._model, self._folder = model, folder
        self._launched = 0
        self._workers = [self._launch() for _ in range(size.workers)]

    def _launch(self) -> FleetWorker:
        # As many active runs as leave the ticks' submitter waiting for room.
        room = str(self.size.per_tick // 2)
        env = {"STEPFLEET_AGENTS": str(FILE), "STEPFLEET_MAX_ACTIVE_RUNS": room}
        self._launched += 1
        name = f"w{self._launched}"
        return FleetWorker(self._folder, self.url, self._model.url, name=name, env=env).launch()

    def kill(self, worker: FleetWorker | None = None) -> None:
        """End a worker by SIGKILL, and launch another one in its place."""
        dead = worker or self._draw.choice(self._workers)
        dead.signal(signal.SIGKILL)
        dead.wait()
        self._workers.remove(dead)
        self._workers.append(self._launch())
        self.kills += 1

    def kill_as_calls_come(self, expected: int) -> None:
        """Kill workers while so many model calls are made."""
        for kill in range(self.size.kills):
            so_far = expected * (kill + 1) // (self.size.kills + 2)
            wait_until(lambda: self._model.log.total >= so_far, within=ENDS, what="more calls")  # noqa: B023
            self.kill()

    def kill_owner(self, first_run: str) -> None:
        """Kill the worker that submits the batch of a tick, when it has made the first run.

        The fleet is paused: the submitter waits for room.
        """
        with redis.Redis.from_url(self.url, decode_responses=True) as client:
            header, turn = Keys().run(first_run), Keys().of(f"{SCHEDULE_TURNS}{NAME}")
            wait_until(lambda: client.exists(header), within=ENDS, what="the first run of a tick")
            owner = int(str(client.get(turn)).split(":")[-2])
            self.kill(next(one for one in self._workers if one.pid == owner))
            client.pexpire(turn, 500)  # as it ends by itself

    def end(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.end()


async def make_due(url: str, lines: int, ticks: int) -> list[str]:
    """Add a schedule some of whose ticks are due at once; return the ids of their batches."""
    # No tick of its own comes while the test runs.
    cron = f"{(datetime.now(UTC).minute + 30) % 60} * * * *"
    given = [{"id": f"{n}", "input": f"tick {{tick}} line {n}"} for n in range(lines)]
    async with AsyncFleet(url) as fleet:
        await fleet.schedules.add(NAME, given, NODE, cron=cron, missed="all")
        opened = await store_of(fleet)
        store = opened.schedules
        view, now = await store.get(NAME), await store.now()
        since = now - timedelta(hours=ticks)
        await store.change(view.schedule.model_copy(update={"created": since}), now)
    found = islice(ticks_after(cron, "UTC", since), ticks)
    return [id_of_keyed_batch(key_of(NAME, tick_id(one))) for one in found]


def submit(fleet: Fleet, size: Size, nodes: list[Node]) -> tuple[list[Batch], list[str], list[str]]:
    """Submit batches that follow each other, a graph of runs, and runs that are handed over."""
    maps = [{"id": f"m{n}", "input": f"map {n}"} for n in range(size.lines)]
    mapped = fleet.submit_batch(maps, agent=NODE)
    total = mapped.then(NODE, "reduce {outputs}", page=size.page, until_one=True)
    each = mapped.then(NODE, "each {id} {input} {output}")
    handed = [fleet.submit(FRONT, f"front {n}") for n in range(size.handed)]
    ids: list[str] = []
    for one in nodes:
        after, failed = [ids[n] for n in one.after], one.after_failed
        ids.append(fleet.submit(NODE, one.text, after=after or None, after_failed=failed))
    return [mapped, total, each], ids, handed


def play(size: Size, server: RedisServer) -> None:
    """Submit all, let workers be killed, wait, and recount."""
    nodes = graph(size.nodes, random.Random(size.seed))
    with short_folder() as folder, Fleet(server.url) as fleet, ModelServer(rules) as model:
        began, played = time.monotonic(), Play(size, server, model, folder)
        try:
            fleet.pause()
            ticks = asyncio.run(make_due(server.url, size.per_tick, size.ticks))
            played.kill_owner(run_id_of(ticks[0], 0))
            tick = fleet.batches.get(ticks[0])
            assert tick.progress().total == size.per_tick > tick.progress().submitted > 0
            fleet.resume()
            batches, ids, handed = submit(fleet, size, nodes)
            played.kill_as_calls_come(size.nodes + size.lines + size.handed)
            results = [fleet.runs.wait(one, timeout=ENDS) for one in ids]
            fronts = [fleet.runs.wait(one, timeout=ENDS) for one in handed]
            (outputs,) = ([one.output for one in total.results()] for total in batches[1:2])
            wait_until(lambda: fleet.schedules.get(NAME).state.submitted == size.ticks, within=ENDS)
            batches += [fleet.batches.get(one) for one in ticks]
            for batch in batches:
                assert batch.wait(ENDS).ok, batch.progress()
            seconds = time.monotonic() - began
            with redis.Redis.from_url(server.url, decode_responses=True) as client:
                lost = check_linked_runs(client)
                assert not client.exists(Keys().of(FOLLOW_UPS))
            check_costs(fleet, all_runs(fleet, ids, handed, batches))
        finally:
            played.end()
        assert not model.violations
        requests = model.requests
    assert outputs == [str(size.lines)]
    check_graph(nodes, ids, results, requests)
    check_calls(size, requests, lost)
    for one in fronts:
        assert (one.agent_name, len(one.handoffs), len(one.steps)) == ("back", 1, 2)
    sys.stdout.write(
        f"\n{len(nodes)} nodes, {size.lines} lines, {size.handed} hand-offs, {size.ticks} ticks: "
        f"{seconds:.0f} s, {played.kills} kills, {len(requests)} calls, "
        f"{repeated(requests)} repeated, {lost} ambiguous\n"
    )


def all_runs(
    fleet: Fleet, ids: Iterable[str], handed: Iterable[str], batches: Iterable[Batch]
) -> Iterator[AgentRunResult]:
    """Yield the results of all runs, those of levels in between, too."""
    yield from (fleet.runs.result(run_id) for run_id in (*ids, *handed))
    known = {batch.id: batch for batch in batches}
    for found in fleet.batches.newest(100):
        batch = known.get(found.batch_id) or fleet.batches.get(found.batch_id)
        yield from batch.results(follow=False)


def check_costs(fleet: Fleet, runs: Iterable[AgentRunResult]) -> None:
    """Assert that the ledger has what the runs have cost."""
    cost = sum(one.cost_usd for one in runs)
    assert cost > 0
    committed = float(fleet.costs().total.committed_usd)
    assert committed == pytest.approx(cost)


def check_graph(
    nodes: list[Node],
    ids: list[str],
    results: list[AgentRunResult],
    requests: Iterable[RequestRecord],
) -> None:
    """Assert that each node began after those before it, with all that they had answered."""
    asked: dict[int, list[RequestRecord]] = {}
    for one in requests:
        if one.question.startswith("node "):
            number = int(one.question.removeprefix("node ").partition(":")[0])
            asked.setdefault(number, []).append(one)
    for node, result in zip(nodes, results, strict=True):
        before = [results[n] for n in node.after]
        failed = any(one.status is not RunStatus.COMPLETED for one in before)
        if failed and node.after_failed == "stop":
            assert node.number not in asked
            assert "dependency_failed" in (result.error or "")
            continue
        (question,) = {one.question for one in asked[node.number]}
        refused = node.number % NINTH == 1
        assert result.output == (None if refused else answer(question)), result.debug()
        began = min(one.received for one in asked[node.number])
        ended = [one.answered or began for n in node.after for one in asked.get(n, ())[-1:]]
        assert began >= max(ended, default=0.0)
        if not node.after:
            continue
        given = orjson.loads(question.partition(": ")[2])
        assert [one["id"] for one in given] == [ids[n] for n in node.after]
        assert [one.get("output") for one in given] == [one.output for one in before]
        assert all("error" in one or "output" in one for one in given)


def check_calls(size: Size, requests: Iterable[RequestRecord], lost: int) -> None:
    """Assert that all was asked for, and nothing twice that is not listed as ambiguous."""
    kinds = Counter(question.split()[0] for question in {one.question for one in requests})
    assert kinds["map"] == kinds["each"] == size.lines
    assert kinds["tick"] == size.ticks * size.per_tick
    assert kinds["front"] == size.handed
    level, pages = size.lines, 0
    while level > 1:
        level = -(-level // size.page)
        pages += level
    assert kinds["reduce"] == pages
    assert repeated(requests) <= lost, "a call was paid twice, and no record tells of it"


def repeated(requests: Iterable[RequestRecord]) -> int:
    """Return how many calls were answered, or at work, once more than needed."""
    paid = Counter((one.key, one.turn) for one in requests if one.outcome in PAID)
    return paid.total() - len(paid)


def test_a_small_graph_survives_killed_workers(own_redis: Callable[..., RedisServer]) -> None:
    """MULTI-01, MULTI-04, MULTI-08, COST-14: in the gate."""
    play(Size(2, 12, 12, 4, 3, 6, 2, 1, seed=1), own_redis())


@pytest.mark.chaos
def test_a_large_graph_survives_killed_workers(own_redis: Callable[..., RedisServer]) -> None:
    """MULTI-01, MULTI-04, MULTI-08, COST-14."""
    play(Size.large(), own_redis())
