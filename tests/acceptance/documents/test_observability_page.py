"""docs/observability.md says what is so, and its samples run with a real worker."""

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.workers.fleet_workers import FleetWorker
from support.workers.known_agents import until_known

from stepfleet.orchestrator.client.rendering import StatusType, UIMetadata
from stepfleet.worker.telemetry import JsonLines
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

PAGE = (Path(__file__).parents[3] / "docs" / "observability.md").read_text(encoding="utf-8")
SHORT, LOGGING, WINDOW = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)[:3]
AGENT = Path(__file__).parents[1] / "agent_modules" / "logging_agent.py"


@pytest.fixture
def own_handlers() -> Iterator[logging.Logger]:
    logger = logging.getLogger("stepfleet")
    before = list(logger.handlers)
    yield logger
    logger.handlers = before


def answers(request: RequestRecord) -> Reply:
    if request.turn > 1:
        return Reply("Three.")
    return Reply("", tool_calls=(ToolCallReply("stock", {"product": "lamp"}),))


def test_the_pages_samples_run(
    redis_url: str,
    model: ModelServer,
    start_worker: Callable[..., FleetWorker],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """OBS-05, UI-07, UI-08: the summary, and a window on a run, from another process."""
    model.follow(answers)
    start_worker(env={"STEPFLEET_AGENTS": str(AGENT)})
    until_known(redis_url, "clerk")
    monkeypatch.setenv("STEPFLEET_REDIS_URL", redis_url)
    exec(SHORT, {})  # noqa: S102 - the page's own sample
    printed = capsys.readouterr().out
    assert printed.startswith("completed completed aggregate stop\n2 ")
    assert "stop reason: completed, resolved by aggregate" in printed
    exec(WINDOW, {})  # noqa: S102 - the page's own sample
    printed = capsys.readouterr().out
    assert "3 assistant Three.\n" in printed
    assert "completed completed [<UIRole.USER: 'user'>, <UIRole.TOOL: 'tool'>, " in printed
    assert printed.endswith("None aggregate\n")


def test_the_sample_for_ones_own_process_runs(own_handlers: logging.Logger) -> None:
    """OBS-04"""
    exec(LOGGING, {})  # noqa: S102 - the page's own sample
    assert isinstance(own_handlers.handlers[-1].formatter, JsonLines)


def test_the_page_names_all_metadata_and_statuses_of_messages() -> None:
    """UI-01"""
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert set(UIMetadata.model_fields) <= named
    assert set(StatusType) <= named
