"""The samples of docs/events.md do what the page says, with a real worker and model server."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.deadlines import wait_until
from support.workers.fleet_workers import FleetWorker
from support.workers.known_agents import until_known

from stepfleet.orchestrator import BroadcastConfig
from stepfleet.orchestrator.events.domain_events import DomainEvent
from stepfleet.orchestrator.events.envelope import EventType
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
PAGE = (Path(__file__).parents[3] / "docs" / "events.md").read_text(encoding="utf-8")
AGENT, FOLLOWING, TEXT, SIGNING = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)


def test_the_pages_samples_run(
    redis_url: str,
    model: ModelServer,
    start_worker: Callable[..., FleetWorker],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """EVT-17, EVT-21, STRM-02, STRM-05: agents on the worker, followers here."""
    agents = tmp_path / "agents.py"
    agents.write_text(AGENT)
    model.follow(lambda _: Reply("An old silent pond", piece=3))
    worker = start_worker(env={"STEPFLEET_AGENTS": str(agents), "PYTHONUNBUFFERED": "1"})
    until_known(redis_url, "writer")
    monkeypatch.setenv("STEPFLEET_REDIS_URL", redis_url)
    names: dict[str, object] = {}
    for sample in (FOLLOWING, TEXT, SIGNING):
        exec(sample, names)  # noqa: S102 - the page's own sample
    said = capsys.readouterr().out
    assert "1 agent.status\n2 agent.status\n3 agent.step.started\n4 agent.step" in said
    assert "1 An old silent pond\n" in said
    assert names["haiku"] == "An old silent pond"
    assert "the signature is wrong" in said
    wait_until(lambda: worker.log.count("AgentFinished") == 3, within=LONG, what="three runs")
    wait_until(lambda: ": STOP (completed), " in worker.log, within=LONG, what="the reason")


def test_the_page_lists_every_type_and_every_field_of_the_presets() -> None:
    """EVT-04, EVT-15, EVT-23."""
    assert set(re.findall(r"^\| `(agent\.[a-z.]+)` \|", PAGE, re.MULTILINE)) == set(EventType)
    told = {one.__name__ for one in DomainEvent.__subclasses__()}
    assert told <= set(re.findall(r"`([A-Z]\w+)`", PAGE))
    assert set(BroadcastConfig.model_fields) <= set(re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE))
