"""The dashboard and the alerts, on a real Prometheus that scrapes two real workers."""

import contextlib
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from support.deadlines import wait_until
from support.servers.prometheus import Prometheus, prometheus
from support.servers.redis_servers import RedisServer, dealt, is_free
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy" / "alerts.yaml"
PANELS: list[dict[str, Any]] = orjson.loads(
    (ROOT / "deploy" / "grafana" / "stepfleet.json").read_bytes()
)["panels"]
QUERIES = {
    f"{panel['title']}, {target['refId']}": target["expr"]
    for panel in PANELS
    for target in panel.get("targets", ())
}
ALERTS = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
}
AGENT = Path(__file__).parents[1] / "agent_modules" / "measured_agents.py"
AGENTS = load_agents(str(AGENT))
# A worker takes the next port where one is taken: it must be nobody's who may bind it much later.
PORTS = range(19_800, 19_900, 4)
WINDOW = "5m"
LONG = 60.0

pytestmark = pytest.mark.timeout(240)


def answers(request: RequestRecord) -> Reply:
    """Call both tools, then answer; slowly enough that runs wait for each other."""
    if "careful" in request.key and request.turn == 1:
        names = ("stock", "broken", "nonsense")
        calls = tuple(ToolCallReply(name, {"product": "lamp"}) for name in names)
        return Reply("", tool_calls=calls, latency=0.2)
    return Reply("Done.", latency=0.2)


def asked(query: str) -> str:
    """Return a panel's query with its variables as Grafana would fill them in."""
    filled = query.replace("$job", "fleet").replace("$queue", ".*")
    return filled.replace("$__rate_interval", WINDOW)


def compared(alert: str) -> str:
    """Return an alert's expression whose comparisons give 0 or 1, where they would give nothing."""
    return re.sub(r" ([<>]) ", r" \1 bool ", alert)


@pytest.fixture(scope="module")
def scraped(servers: tuple[RedisServer, ModelServer], tmp_path_factory: Any) -> Iterator[Any]:
    """A Prometheus over two workers that have done something of everything."""
    (redis, model), folder = servers, tmp_path_factory.mktemp("fleet")
    model.follow(answers)
    model.fail(Fault("rate_limited"), key="careful 1", turn=1)
    model.fail(Fault("unauthorized"), key="strict", attempt=None)
    ports = list(islice((port for port in dealt(PORTS) if is_free(port)), 2))
    with contextlib.ExitStack() as cleanup:
        fleet = cleanup.enter_context(Fleet(redis.url))
        fleet.limits.set("openai:scripted", in_flight=1)
        fleet.runs.cancel(fleet.submit(AGENTS["strict"], "its message will be refused"))
        for number, port in enumerate(ports):
            env = {"STEPFLEET_AGENTS": str(AGENT), "STEPFLEET_METRICS_PORT": str(port)}
            env |= {"STEPFLEET_ARCHIVE_URL": (folder / "archive").as_uri()}
            worker = FleetWorker(folder, redis.url, model.url, name=f"w{number}", env=env)
            cleanup.callback(worker.end)
            worker.start()
        server = cleanup.enter_context(prometheus(folder, RULES, ports))
        ids = [fleet.submit(AGENTS["careful"], f"careful {n}") for n in range(4)]
        ids += [fleet.submit(AGENTS["strict"], "strict")]
        ends = [fleet.runs.wait(one, timeout=LONG).success for one in ids]
        assert ends == [True] * 4 + [False]
        for _ in range(2):
            fleet.run(AGENTS["cached"], "the same", timeout=LONG)
        yield server


def test_every_query_of_the_dashboard_and_of_the_alerts_finds_what_workers_serve(
    scraped: Prometheus,
) -> None:
    """OPS-06, OBS-02: each gives at least one series, by a real Prometheus."""
    left = {name: asked(query) for name, query in QUERIES.items()}
    left |= {name: compared(query) for name, query in ALERTS.items()}
    assert len(QUERIES) > 40

    def all_answered() -> bool:
        for name in [one for one, query in left.items() if scraped.query(query)]:
            del left[name]
        return not left

    try:
        wait_until(all_answered, within=LONG, what="an answer to each query")
    except AssertionError:
        pytest.fail(f"nothing answers {left}")
    rules = [rule for group in scraped.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == set(ALERTS)
    wait_until(lambda: all(r["health"] == "ok" for r in rules), within=1, what="sound rules")


def test_figures_of_the_fleet_are_taken_once_and_those_of_workers_are_added_up(
    scraped: Prometheus,
) -> None:
    """OPS-06: with two workers."""
    titles = {panel["title"]: panel["targets"] for panel in PANELS if "targets" in panel}

    def value_of(title: str, ref: int = 0) -> list[float]:
        return [value for _, value in scraped.query(asked(titles[title][ref]["expr"]))]

    wait_until(lambda: value_of("Workers") == [2], within=LONG, what="both workers")
    wait_until(lambda: value_of("Slots", 1) == [100], within=LONG, what="the slots of both")
    wait_until(lambda: len(value_of("Memory")) == 2, within=LONG, what="the memory of each")
    ended = 'sum by (agent, status) (stepfleet_runs_total{job="fleet"})'
    expected = {("careful", "completed"): 4, ("cached", "completed"): 2, ("strict", "failed"): 1}

    def runs() -> dict[tuple[str, str], float]:
        return {(one["agent"], one["status"]): value for one, value in scraped.query(ended)}

    wait_until(lambda: runs() == expected, within=LONG, what="seven runs, each counted once")
    wait_until(lambda: value_of("Builds") == [2], within=LONG, what="one build of both")
