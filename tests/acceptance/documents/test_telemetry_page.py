"""Traces and metrics of docs/observability.md: the samples run with a worker and a collector."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from redis import Redis
from support.deadlines import wait_until
from support.servers.otlp_collector import collector
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator.store import keys
from stepfleet.worker.telemetry.metrics import ARCHIVE, PORTS, Metrics
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

PAGE = (Path(__file__).parents[3] / "docs" / "observability.md").read_text(encoding="utf-8")
TRACE, AGENT = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)[3:]


def answers(request: RequestRecord) -> Reply:
    if request.turn > 1:
        return Reply("Four.")
    return Reply("", tool_calls=(ToolCallReply("stock", {"product": "lamp"}),))


def test_the_pages_samples_run(
    redis_url: str,
    model: ModelServer,
    start_worker: Callable[..., FleetWorker],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """OBS-01, OBS-03, DOC-03: a trace is found by its run's id, spans of tools in it."""
    model.follow(answers)
    agents = tmp_path / "telemetry_sample.py"
    agents.write_text(AGENT, encoding="utf-8")
    with collector() as otlp:
        env = {
            "STEPFLEET_AGENTS": str(agents),
            "OTEL_EXPORTER_OTLP_ENDPOINT": otlp.url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        start_worker(env=env)
        with Redis.from_url(redis_url) as redis:
            known = partial(redis.hexists, keys.NAMES, "clerk")
            wait_until(known, within=60, what="the worker's agent is known")
        monkeypatch.setenv("STEPFLEET_REDIS_URL", redis_url)
        exec(TRACE, {})  # noqa: S102 - the page's own sample
        trace = capsys.readouterr().out.split()[1]
        wait_until(otlp.has_all(trace, "agent_run", "shelf"), within=60, what="its spans")
        spans = {span.id: span for span in otlp.of(trace)}
        shelf = next(span for span in spans.values() if span.name == "shelf")
        above = spans[shelf.parent]
        assert above.name == "tool_execution"
        assert [spans[above.parent].name, spans[spans[above.parent].parent].name] == [
            "step_1",
            "agent_run",
        ]
        table = PAGE.partition("| span |")[2].partition("\n\n")[0]
        named = set(re.findall(r"`(\w+)`", table))
        named.remove("tool_decision")  # of a call that waited for a person
        assert {span.name for span in spans.values()} - {"shelf"} == named


def test_the_page_names_every_metric() -> None:
    """OBS-02, DOC-03"""
    metrics = Metrics()
    metrics.gauge("stepfleet_steps_in_flight", "", float)
    metrics.gauge("stepfleet_tool_tasks_in_flight", "", float)
    metrics.count("stepfleet_telemetry_dropped", "", float)
    made = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in metrics.registry.collect()
    }
    made |= {f"stepfleet_{name}" for name, _ in ARCHIVE.values()}  # where there is an archive
    own = {name for name in made if not name.startswith(("process_", "python_"))}
    table = PAGE.partition("| metric |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == own
    assert f"out of {PORTS}," in PAGE
