"""Runs that wait for others and for people, on a Redis Cluster, and with RabbitMQ as the broker.

Parents with two levels below them, approvals and questions, runs behind others, hand-offs, a batch
behind a batch and a schedule. All of it waits, or is at work in one worker, when that is killed.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from kombu.connection import Connection
from support.deadlines import wait_until
from support.servers.rabbit_server import RabbitServer
from support.servers.redis_cluster import RedisCluster, redis_cluster
from support.servers.redis_servers import short_folder
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import AgentRunResult, AsyncFleet, Fleet, RunStatus
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.client.blocking import Batch
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.records.run.summary import RunTree
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

FILE = Path(__file__).parents[1] / "agent_modules" / "linked_agents.py"
AGENTS = load_agents(str(FILE))
LEAD, RECEPTION, DESK = (AGENTS[name] for name in ("lead", "reception", "desk"))
LONG = 100.0
ROWS = 4
HELD = ("check", "line")
HOURLY = "hourly"
Start = Callable[..., FleetWorker]
Strike = Callable[[], None]


class Rules:
    """A model that plays all agents. Requests of the kinds held get no answer before the strike."""

    has_struck = False

    def __call__(self, request: RequestRecord) -> Reply:
        kind, _, rest = request.question.partition(" ")
        got = [one.content for one in request.answers]
        if calls := () if got else _calls(kind, rest):
            return Reply("", tool_calls=calls)
        if kind in HELD and not self.has_struck:
            return Reply("never read", latency=LONG)
        if kind in ("topic", "look", "pay"):
            return Reply(f"{kind} {rest}: {', '.join(got)}")
        return Reply(f"<{request.question}>")


def _calls(kind: str, rest: str) -> tuple[ToolCallReply, ...]:
    """Return the calls of a first answer."""
    if kind == "topic":
        looks = (ToolCallReply("scout", {"input": f"look {rest} {n}"}) for n in range(2))
        return (*looks, ToolCallReply("clerk", {"input": f"pay {rest}"}))
    if kind == "look":
        return (ToolCallReply("checker", {"input": f"check {rest}"}),)
    if kind == "pay":
        asks = {"question": f"which colour has {rest}?", "options": ["red", "blue"]}
        return ToolCallReply("refund", {"customer": rest}), ToolCallReply("ask_person", asks)
    if kind == "tell":
        return (ToolCallReply("transfer_to_desk", {"reason": "their trade"}),)
    return ()


@dataclass
class Web:
    """Runs and batches that wait for each other: `size` parents, and as many runs behind them."""

    fleet: Fleet
    model: ModelServer
    effects: Path
    size: int

    def submit(self) -> None:
        """Submit all but the schedule's batch, which is not due yet."""
        fleet = self.fleet
        self.leads = [fleet.submit(LEAD, f"topic {n}") for n in range(self.size)]
        self.tells = [
            fleet.submit(RECEPTION, "tell {facts}", after={"facts": one}) for one in self.leads
        ]
        self.last = fleet.submit(DESK, "joined {count}", after=self.tells)
        lines = [{"id": f"{n}", "input": f"line {n}"} for n in range(ROWS)]
        self.batch = fleet.submit_batch(lines, agent=DESK)
        self.final = self.batch.then(DESK, "page {outputs}", page=2, until_one=True)
        # No tick of its own comes while the test runs.
        cron = f"{(datetime.now(UTC).minute + 30) % 60} * * * *"
        fleet.schedules.add(HOURLY, [{"id": "a", "input": "tick"}], DESK, cron=cron)

    def until_all_waits(self) -> None:
        """Return when each call that is held is at work, and each person is asked."""
        held, asked = 2 * self.size + ROWS, 2 * self.size
        wait_until(lambda: self._held().total() == held, within=LONG, what="the calls held")
        wait_until(lambda: self._asked() == asked, within=LONG, what="what people are asked")

    def decide(self) -> None:
        """Decide all that waits for people."""
        assert self.fleet.decide(tool="refund").applied == self.size
        assert self.fleet.decide(tool="ask_person", answer="blue").applied == self.size

    def check(self) -> None:
        """Assert that all is complete and was done once, and that nothing waits any more."""
        assert self.fleet.runs.wait(self.last, LONG).output == f"<joined {self.size}>"
        assert [one.success for one in self.final.results()] == [True]
        assert [one.output for one in self._ticked().results()] == ["<tick>"]
        assert self.batch.wait(LONG).completed == ROWS
        listed = self.fleet.runs.page(limit=500).runs
        runs = [self.fleet.runs.result(one.run_id) for one in listed]
        assert {one.status for one in runs} == {RunStatus.COMPLETED}
        assert len(runs) == 7 * self.size + ROWS + 2 + 1 + 1 + 1
        for lead, tell in zip(self.leads, self.tells, strict=True):
            self._check_pair(self.fleet.runs.result(lead), self.fleet.runs.result(tell))
        self._check_calls(runs)
        assert not self._asked()
        overview = self.fleet.overview()
        assert (overview.active, overview.queue_length, overview.quarantined) == (0, 0, 0)

    def _check_pair(self, lead: AgentRunResult, tell: AgentRunResult) -> None:
        """Assert what came of a parent and of the run behind it, and that costs add up."""
        n = self.leads.index(lead.run_id)
        looks = [f"look {n} {i}: <check {n} {i}>" for i in range(2)]
        assert lead.output == f"topic {n}: {', '.join(looks)}, pay {n}: paid {n}, blue"
        below = [self.fleet.runs.result(one) for one in _names(self.fleet.runs.tree(lead.run_id))]
        assert len(below) == 5
        assert lead.below_cost_usd == pytest.approx(sum(one.cost_usd for one in below))
        assert tell.output == f"<tell {lead.output}>"
        assert [(one.by, one.to) for one in tell.handoffs] == [("reception", "desk")]

    def _check_calls(self, runs: list[AgentRunResult]) -> None:
        """Assert that calls of tools and models were made once; the lost ones, which are listed."""
        paid = self.effects.read_text().splitlines()
        assert len(paid) == len({one.split()[0] for one in paid}) == self.size
        calls = Counter((one.question, one.turn) for one in self.model.requests)
        assert len(calls) == 12 * self.size + ROWS + 2 + 1 + 1 + 1
        assert all(calls[question, 1] >= 2 for question in self._held())
        lost = sum(one.ambiguous for run in runs for one in run.lost_attempts)
        assert calls.total() - len(calls) <= lost, "a call was paid twice, and nothing tells of it"
        (row,) = (r for r in self.fleet.costs("status").rows if r.group["status"] == "committed")
        assert row.calls == len(calls)
        assert float(row.usd) == pytest.approx(sum(one.cost_usd for one in runs))

    def _held(self) -> Counter[str]:
        asked = (one.question for one in self.model.requests)
        return Counter(one for one in asked if one.split()[0] in HELD)

    def _asked(self) -> int:
        return sum(1 for _ in self.fleet.approvals.all())

    def _ticked(self) -> Batch:
        def noted() -> str | None:
            return self.fleet.schedules.get(HOURLY).state.batch_id

        batch_id = wait_until(noted, within=LONG, what="the batch of the schedule")
        assert batch_id is not None
        return self.fleet.batches.get(batch_id)


def _names(tree: RunTree) -> Iterator[str]:
    """Yield the ids of all runs below one."""
    for one in tree.below:
        yield one.run.run_id
        yield from _names(one)


async def make_due(url: str) -> None:
    """Let the schedule be an hour old: one tick is to be made up."""
    async with AsyncFleet(url) as fleet:
        store = await store_of(fleet)
        schedules = store.schedules
        view, now = await schedules.get(HOURLY), await schedules.now()
        earlier = view.schedule.model_copy(update={"created": now - timedelta(hours=1)})
        await schedules.change(earlier, now)


def play(web: Web, url: str, start: Callable[..., FleetWorker], strike: Strike) -> None:
    """Let one worker begin everything; strike, kill it, decide, and let another one end it."""
    rules = Rules()
    web.model.follow(rules)
    victim = start(name="victim")
    web.submit()
    web.until_all_waits()
    heir = start(name="heir")
    strike()
    rules.has_struck = True
    victim.signal(signal.SIGKILL)
    asyncio.run(make_due(url))
    web.decide()
    web.check()
    assert heir.exit_code is None
    assert "rescue failed" not in heir.log


@pytest.fixture
def start(start_worker: Start, effects: Path) -> Start:
    """Start a worker that has the agents, and room for all that is held."""
    env = {"STEPFLEET_AGENTS": str(FILE), "EFFECTS": str(effects), "STEPFLEET_SLOTS": "200"}
    return partial(start_worker, env={**env, "STEPFLEET_LEASE": "2"})


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    with redis_cluster(replicas=1) as made:
        yield made


@pytest.fixture
def on_cluster(
    cluster: RedisCluster,
    redis_url: str,
    model: ModelServer,
    start: Start,
    effects: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[int], None]:
    """Play it in a size while a master dies; the broker is the session's Redis."""
    monkeypatch.setenv("STEPFLEET_BROKER_URL", redis_url)

    def strike() -> None:
        cluster.replicated()
        cluster.masters[0].kill()

    def play_it(size: int) -> None:
        with Fleet(cluster.url) as fleet:
            web = Web(fleet, model, effects, size)
            play(web, cluster.url, partial(start, url=cluster.url), strike)
        assert cluster.owner(0) is cluster.replicas[0]

    return play_it


def test_on_a_cluster_all_end_though_a_master_and_a_worker_die(
    on_cluster: Callable[[int], None],
) -> None:
    """DIST-08, MULTI-04, MULTI-08: people are asked while the master's replica follows it."""
    on_cluster(2)


@pytest.mark.long
def test_on_a_cluster_many_end_though_a_master_and_a_worker_die(
    on_cluster: Callable[[int], None],
) -> None:
    """DIST-08, MULTI-04."""
    on_cluster(20)


@pytest.fixture
def rabbit() -> Iterator[RabbitServer]:
    with short_folder() as folder:
        server = RabbitServer(folder)
        try:
            yield server.start()
        finally:
            server.end()


@pytest.mark.rabbitmq
@pytest.mark.parametrize("what", ["restart", "purge", "wipe"])
def test_over_rabbitmq_all_end_though_the_broker_loses_messages_and_a_worker_dies(
    what: str,
    rabbit: RabbitServer,
    redis_url: str,
    model: ModelServer,
    start: Start,
    effects: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DIST-10, MULTI-04: the broker has hints only; what it loses is found in Redis."""
    monkeypatch.setenv("STEPFLEET_BROKER_URL", rabbit.url)

    def strike() -> None:
        if what == "purge":
            with Connection(rabbit.url) as connection:  # type: ignore[no-untyped-call]
                connection.channel().queue_purge("stepfleet")
        else:
            rabbit.restart(empty=what == "wipe")

    with Fleet(redis_url) as fleet:
        play(Web(fleet, model, effects, 5), redis_url, start, strike)
