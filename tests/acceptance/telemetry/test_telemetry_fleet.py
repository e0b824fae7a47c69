"""Real workers that send spans to a collector and serve metrics."""

import re
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.deadlines import wait_until
from support.servers.otlp_collector import CLIENT, Collector, TakenSpan, collector
from support.servers.redis_servers import dealt, is_free
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.version import own_build
from stepfleet.worker.telemetry import metrics
from stepfleet.worker.telemetry.instrumentation import METRICS_PORT
from stepfleet.worker.telemetry.span_plans import run_span_id
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
AGENT = Path(__file__).parents[1] / "agent_modules" / "traced_agents.py"
AGENTS = load_agents(str(AGENT))
# Workers that send spans start cold, up to three of them one after the other.
LONG = 180.0
# A worker takes the next port where one is taken: it must be nobody's who may bind it much later.
PORTS = range(19_900, 20_000, 2)
PRIVATE = ("how many lamps", "lamp", "three pieces", "canary-7", "sk-test-canary")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def otlp() -> Iterator[Collector]:
    with collector() as kept:
        yield kept


@pytest.fixture
def env(otlp: Collector, tmp_path: Path) -> dict[str, str]:
    return {
        "STEPFLEET_AGENTS": str(AGENT),
        "OTEL_EXPORTER_OTLP_ENDPOINT": otlp.url,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "ALLOWED": str(tmp_path / "allowed"),
    }


def asks_for(*names: str) -> Callable[[RequestRecord], Reply]:
    def rules(request: RequestRecord) -> Reply:
        if request.turn > 1:
            return Reply("Three pieces.")
        return Reply("", tool_calls=tuple(ToolCallReply(n, {"product": "lamp"}) for n in names))

    return rules


def one(spans: list[TakenSpan], name: str) -> TakenSpan:
    (found,) = [span for span in spans if span.name == name]
    return found


def metrics_port() -> int:
    """Return a port that is free, as is the one above it, and that no other test deals."""
    return next(port for port in dealt(PORTS) if is_free(port) and is_free(port + 1))


def served_port(worker: FleetWorker) -> int:
    """Return the port at which a worker says that it serves its metrics."""
    served = re.compile(r"metrics are served at http://127\.0\.0\.1:(\d+)/metrics")
    said = wait_until(lambda: served.search(worker.log), within=LONG, what="the worker's metrics")
    assert said
    return int(said[1])


def scraped(port: int) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_run_is_one_trace_over_three_workers(
    redis_url: str, model: ModelServer, start_worker: Start, otlp: Collector, env: dict[str, str]
) -> None:
    """OBS-01, OBS-03, RUN-01: steps on two workers, their tool on a third; ids and nesting."""
    model.follow(asks_for("render"))
    first = start_worker(name="w1", env=env)
    start_worker(name="w2", options=("-Q", "gpu"), env=env)
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(AGENTS["painter"], "How many lamps?")
        wait_until(otlp.has_all(run_id, "llm_generate"), within=LONG, what="the first step's call")
        first.signal(signal.SIGTERM)
        assert first.wait(within=LONG) == 0
        start_worker(name="w3", env=env)
        Path(env["ALLOWED"]).touch()
        assert fleet.runs.wait(run_id, timeout=LONG).success
    told = otlp.has_all(run_id, "agent_run", "step_1", "tool_execution")
    wait_until(told, within=LONG, what="the spans of all workers")
    spans = otlp.of(run_id)
    assert otlp.names(run_id) == sorted(
        ["agent_run", "step_1", "step_2", "llm_generate", "llm_generate", "tool_execution"]
    )
    run, step, later = one(spans, "agent_run"), one(spans, "step_1"), one(spans, "step_2")
    tool = one(spans, "tool_execution")
    assert run.parent == ""
    assert int(run.id, 16) == run_span_id(run_id)
    assert (step.parent, later.parent) == (run.id, run.id)
    assert tool.parent == step.id
    asked = [span for span in spans if span.name == "llm_generate"]
    assert [span.parent for span in asked] == [step.id, later.id]
    assert len({span.id for span in spans}) == 6
    assert {span.attributes["stepfleet.run_id"] for span in spans} == {run_id}
    assert [span.worker for span in (asked[0], tool, later)] == ["w1@test", "w2@test", "w3@test"]
    for span in spans:
        above = next((s for s in spans if s.id == span.parent), span)
        assert above.began <= span.began <= span.ended <= above.ended


def test_spans_follow_the_conventions_and_tell_nothing_that_was_said(
    redis_url: str, model: ModelServer, start_worker: Start, otlp: Collector, env: dict[str, str]
) -> None:
    """OBS-01, CONF-08: what is told of a run, and what never is."""
    model.follow(asks_for("stock", "broken"))
    start_worker(env=env)
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(AGENTS["clerk"], "how many lamps")
        result = fleet.runs.wait(run_id, timeout=LONG)
    wait_until(otlp.has_all(run_id, "agent_run", "shelf"), within=LONG, what="its spans")
    spans = otlp.of(run_id)
    run, asked = one(spans, "agent_run"), next(s for s in spans if s.name == "llm_generate")
    assert run.service == "stepfleet-worker"
    assert run.attributes["gen_ai.operation.name"] == "invoke_agent"
    assert run.attributes["gen_ai.agent.name"] == "clerk"
    assert run.attributes["gen_ai.usage.input_tokens"] == result.usage.prompt_tokens
    assert run.attributes["stepfleet.stop_reason"] == result.stop_reason
    assert asked.kind == CLIENT
    assert asked.attributes["gen_ai.operation.name"] == "chat"
    assert asked.attributes["gen_ai.provider.name"] == "openai"
    assert asked.attributes["gen_ai.request.model"] == "scripted"
    assert asked.attributes["gen_ai.response.finish_reasons"] == ["tool_calls"]
    tools = {s.attributes["gen_ai.tool.name"]: s for s in spans if s.name == "tool_execution"}
    assert tools["stock"].error == ""
    assert tools["broken"].error == "TOOL_EXECUTION_ERROR"
    assert tools["broken"].attributes["error.type"] == "TOOL_EXECUTION_ERROR"
    assert one(spans, "step_1").error == "TOOL_EXECUTION_ERROR"
    assert one(spans, "shelf").parent == tools["stock"].id
    sent = b"".join(otlp.bodies).lower()
    assert [word for word in PRIVATE if word.encode() in sent] == []


def test_a_run_for_another_one_names_it_and_is_linked_to_it(
    redis_url: str, model: ModelServer, start_worker: Start, otlp: Collector, env: dict[str, str]
) -> None:
    """MULTI-03: the parent's id on the child's spans, and a link to the parent's own."""

    def leads(request: RequestRecord) -> Reply:
        if request.key == "lead" and request.turn == 1:
            return Reply("", tool_calls=(ToolCallReply("clerk", {"input": "third"}),))
        return Reply("Yes.")

    model.follow(leads)
    start_worker(env=env)
    with Fleet(redis_url) as fleet:
        led = fleet.submit(AGENTS["leader"], "lead")
        (end,) = (one.run for one in fleet.runs.wait(led, timeout=LONG).steps[0].tool_calls)
        assert end is not None
        parent = fleet.submit(AGENTS["clerk"], "first")
        child = fleet.submit(AGENTS["clerk"], "second", parent=parent)
        for run_id in (parent, child):
            assert fleet.runs.wait(run_id, timeout=LONG).success
            wait_until(otlp.has_all(run_id, "agent_run"), within=LONG, what="the run's span")
    above, below = one(otlp.of(parent), "agent_run"), one(otlp.of(child), "agent_run")
    assert below.attributes["stepfleet.parent_run_id"] == parent
    assert one(otlp.of(child), "step_1").attributes["stepfleet.parent_run_id"] == parent
    assert below.links == ((above.trace, above.id),)
    assert above.links == ()
    # A run that a call has started is part of its caller's trace, below the span of that call.
    wait_until(lambda: otlp.names(led).count("agent_run") == 2, within=LONG, what="both spans")
    runs = {s.attributes["stepfleet.run_id"]: s for s in otlp.of(led) if s.name == "agent_run"}
    call = one(otlp.of(led), "tool_execution")
    first = min(s.began for s in otlp.of(led) if s.name == "step_1")
    step = next(s for s in otlp.of(led) if s.name == "step_1" and s.began == first)
    assert (runs[end.run_id].parent, call.parent, step.parent) == (call.id, step.id, runs[led].id)
    assert [runs[run_id].links for run_id in (led, end.run_id)] == [(), ()]


@pytest.mark.parametrize("options", [(), ("--pool", "prefork", "--concurrency", "1")])
def test_metrics_count_what_was_done(
    options: tuple[str, ...],
    redis_url: str,
    model: ModelServer,
    start_worker: Start,
) -> None:
    """OBS-02: values after a scripted run, scraped over HTTP; without a collector."""
    model.follow(asks_for("stock", "broken", "nonsense"))
    model.fail(Fault("server_error"), turn=1, attempt=1)
    env = {"STEPFLEET_AGENTS": str(AGENT), "STEPFLEET_METRICS_PORT": str(metrics_port())}
    port = served_port(start_worker(options=options, env=env))
    with Fleet(redis_url) as fleet:
        assert fleet.run(AGENTS["clerk"], "how many lamps", timeout=LONG)
    ended = ("stepfleet_runs_total", "clerk", "completed", "completed")
    wait_until(lambda: scraped(port).get(ended) == 1, within=LONG, what="the run is counted")
    in_flight = ("stepfleet_steps_in_flight",)
    wait_until(lambda: scraped(port)[in_flight] == 0, within=LONG, what="the step has ended")
    told = scraped(port)
    assert told["stepfleet_model_seconds_count", "openai:scripted"] == 2
    assert told["stepfleet_model_seconds_sum", "openai:scripted"] > 0
    assert told["stepfleet_model_errors_total", "openai:scripted", "model"] == 1
    assert told["stepfleet_tool_calls_total", "success", "stock"] == 1
    assert told["stepfleet_tool_calls_total", "error", "broken"] == 1
    assert told["stepfleet_tool_calls_total", "error", "unknown"] == 1
    assert told["stepfleet_tool_errors_total", "TOOL_NOT_FOUND", "unknown"] == 1
    assert told["stepfleet_tool_errors_total", "TOOL_EXECUTION_ERROR", "broken"] == 1
    assert told["stepfleet_steps_total", "clerk", "retry"] == 1
    assert told["stepfleet_rescued_total",] >= 1
    assert told["stepfleet_telemetry_dropped_total",] == 0
    assert told["stepfleet_store_up",] == 1
    wait_until(
        lambda: scraped(port)["stepfleet_loop_lag_seconds_count",] > 0, within=LONG, what="a look"
    )


def test_a_worker_serves_metrics_unless_it_is_told_not_to(
    redis_url: str, commands: CommandLine
) -> None:
    """OPS-06, OBS-02: as `stepfleet worker` starts it, without a setting."""
    commands.start("worker", "--agents", "agents.py", STEPFLEET_REDIS_URL=redis_url)
    said = re.compile(r"metrics are served at http://127\.0\.0\.1:(\d+)/metrics")
    found = wait_until(lambda: said.search(commands.said), within=LONG, what="where it serves")
    assert found
    port = int(found[1])
    assert METRICS_PORT <= port < METRICS_PORT + metrics.PORTS
    told = wait_until(lambda: scraped(port), within=LONG, what="its metrics")
    assert told["stepfleet_build_info", own_build().commit, own_build().version] == 1


def test_a_collector_that_does_not_answer_delays_nothing(
    redis_url: str, model: ModelServer, start_worker: Start, env: dict[str, str]
) -> None:
    """OBS-01: runs go on, and the worker ends in its time."""
    model.follow(asks_for("stock"))
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        worker = start_worker(env={**env, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
        with Fleet(redis_url) as fleet:
            given = [{"id": f"{n}", "input": f"how many {n}"} for n in range(200)]
            batch = fleet.submit_batch(given, agent=AGENTS["clerk"])
            assert [result.success for result in batch.results()] == [True] * 200
        worker.signal(signal.SIGTERM)
        assert worker.wait(within=LONG) == 0
    assert "did not end within" not in worker.log


def test_processes_on_one_machine_take_ports_one_after_the_other(
    redis_url: str, model: ModelServer, start_worker: Start, env: dict[str, str]
) -> None:
    """OBS-02: loopback alone, and the log says where."""
    port = metrics_port()
    told = {**env, "STEPFLEET_METRICS_PORT": str(port), "STEPFLEET_TELEMETRY": "auto"}
    first = start_worker(name="w1", env=told)
    assert served_port(first) == port
    second = start_worker(name="w2", env=told)
    assert served_port(second) > port
    said = [line for line in (first.log + second.log).splitlines() if "metrics are served" in line]
    assert len(said) == 2
    assert all("http://127.0.0.1:" in line for line in said)
