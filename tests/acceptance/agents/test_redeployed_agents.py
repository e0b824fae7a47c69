"""A run in the midst of which its agent's code is deployed anew: it goes on as it began."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from support.deadlines import wait_until
from support.workers.fleet_workers import FleetWorker
from support.workers.known_agents import until_known

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.store import keys
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
NOWHERE = "http://127.0.0.1:9/v1"
CODE = """\
from stepfleet.orchestrator import AgentBuilder, tool

@tool(thread=False)
def look(what: str) -> str:
    '''Look something up.'''
    return '{release} saw ' + what

clerk = (
    AgentBuilder('clerk')
    .with_model('openai:{release}-model')
    .with_base_url('{url}')
    .with_system_prompt('{release} words.')
    .with_max_iterations({most})
    .with_max_tokens({most}00)
    .with_tools(look)
    .build()
)
"""


def known(redis_url: str) -> object:
    """Return the configuration that the fleet knows by the agent's name."""
    with redis.Redis.from_url(redis_url) as client:
        return client.hget(keys.NAMES, "clerk")


def rules(request: RequestRecord) -> Reply:
    if request.turn == 1:
        return Reply(tool_calls=(ToolCallReply("look", {"what": "that"}),))
    return Reply("Done.")


def test_a_run_keeps_its_configuration_when_its_workers_are_replaced_by_others_with_new_code(
    hold: Callable[..., tuple[threading.Event, threading.Event]],
    start_worker: Callable[..., FleetWorker],
    model: ModelServer,
    redis_url: str,
    tmp_path: Path,
) -> None:
    """CONF-02, CONF-07: as the builder was told; a run that begins behind it has the new one."""
    code = tmp_path / "clerks.py"
    env = {"STEPFLEET_AGENTS": str(code), "OPENAI_BASE_URL": NOWHERE}
    reached, struck = hold(rules, 2)

    def deploy(release: str, most: int) -> FleetWorker:
        code.write_text(CODE.format(release=release, most=most, url=model.url), encoding="utf-8")
        return start_worker(name=release, env=env)

    old = deploy("old", 4)
    until_known(redis_url, "clerk")
    with Fleet(redis_url) as fleet:
        running = fleet.submit("clerk", "running")
        assert reached.wait(LONG)
        old.signal(signal.SIGTERM)
        assert old.wait(within=LONG) == 0
        told = known(redis_url)
        deploy("new", 9)
        wait_until(lambda: known(redis_url) != told, within=LONG, what="news of the new code")
        struck.set()
        begun = fleet.runs.wait(running, timeout=LONG)
        fresh = fleet.runs.wait(fleet.submit("clerk", "fresh"), timeout=LONG)
    assert len({step.worker for step in begun.steps}) == len(begun.steps) == 2
    assert (begun.output, begun.max_iterations) == ("Done.", 4)
    assert (fresh.output, fresh.max_iterations) == ("Done.", 9)
    asked: dict[str, set[tuple[Any, ...]]] = {"running": set(), "fresh": set()}
    for request in model.requests:
        body = request.body
        limit = body.get("max_tokens") or body.get("max_completion_tokens")
        asked[request.question].add((body["model"], request.messages[0]["content"], limit))
    assert asked["running"] == {("old-model", "old words.", 400)}
    assert asked["fresh"] == {("new-model", "new words.", 900)}
