"""Every way in which a run can stop, through a real worker, and what `stepfleet explain` says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic.alias_generators import to_snake
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer, short_folder
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import AgentRunResult, Fleet, Lifecycle, RunStatus, StopReason
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply, Usage
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
AGENTS = load_agents(str(Path(__file__).parents[1] / "agent_modules" / "agents.py"))
PRICED = "openai:gpt-4o"
TOKENS = Usage(1000, 500)


class Case(NamedTuple):
    """How a run is made to stop for a reason, and what is said of it then.

    `numbers` are the deciding criterion's, as they are printed.
    """

    agent: str
    overrides: dict[str, Any]
    status: RunStatus
    lifecycle: Lifecycle
    criterion: str
    numbers: str


LIMIT = (RunStatus.MAX_ITERATIONS_REACHED, Lifecycle.STOPPED)
DONE = (RunStatus.COMPLETED, Lifecycle.COMPLETED)
FAILED = (RunStatus.ERROR, Lifecycle.FAILED)


def failures(number: int, limit: int) -> str:
    """Return how failures in a row are printed."""
    return f"consecutive_failures={number}, total_failures={number}, max_retries={limit}"


CASES = {
    StopReason.COMPLETED: Case("plain", {}, *DONE, "ToolCallPresenceCheck", "steps=2"),
    StopReason.STEPS_LIMIT: Case(
        "plain", {"max_steps": 2}, *LIMIT, "StepsLimit", "value=2, limit=2"
    ),
    StopReason.TOKEN_LIMIT: Case(
        "plain", {"token_limit": 2000}, *LIMIT, "TokenUsageLimit", "value=3000, limit=2000"
    ),
    StopReason.TIME_LIMIT: Case(
        "plain",
        {"cumulative_timeout": 0.2},
        *LIMIT,
        "CumulativeExecutionTimeLimit",
        "limit=0.2",
    ),
    StopReason.RETRY_LIMIT: Case(
        "patient",
        {},
        *FAILED,
        "ErrorPolicyCriterion",
        failures(3, 3),
    ),
    StopReason.ERROR: Case(
        "strict",
        {},
        *FAILED,
        "ErrorPolicyCriterion",
        failures(1, 0),
    ),
    StopReason.FINISH_REASON: Case(
        "plain",
        {"finish_reasons": ["length"]},
        *DONE,
        "FinishReasonCheck",
        'finish_reason=length, ends_on=["length"]',
    ),
    StopReason.GUARD: Case(
        "plain",
        {"model": PRICED, "budget_usd": 0.01},
        RunStatus.ERROR,
        Lifecycle.STOPPED,
        "BudgetLimit",
        "value=0.015, limit=0.01",
    ),
    StopReason.USER_REQUESTED: Case(
        "plain",
        {},
        RunStatus.CANCELLED,
        Lifecycle.CANCELLED,
        "StopRequested",
        "note=a cancel was requested",
    ),
}


def answer(request: RequestRecord) -> Reply:
    """Look something up again and again, but as the question's first word says."""
    look = (ToolCallReply("look", {"what": str(request.turn)}),)
    match request.question.split()[0]:
        case "completed" if request.turn > 1:
            return Reply("The answer.", usage=TOKENS)
        case "time_limit":
            return Reply(tool_calls=look, usage=TOKENS, latency=0.25)
        case "error" | "retry_limit":
            return Reply(tool_calls=(ToolCallReply("broken", {"what": "it"}),), usage=TOKENS)
        case "finish_reason":
            return Reply("The answer is so long that", usage=TOKENS, finish_reason="length")
        case "user_requested" if request.turn > 1:
            return Reply("too late", usage=TOKENS, latency=600.0)
    return Reply(tool_calls=look, usage=TOKENS)


class Stopped(NamedTuple):
    """The nine runs, and a command line that can see them."""

    results: dict[StopReason, AgentRunResult]
    stepfleet: CommandLine


@pytest.fixture(scope="module")
def stopped(redis_server: RedisServer) -> Iterator[Stopped]:
    """One run per reason, all by one worker."""
    redis_server.flush()
    with short_folder() as folder, ModelServer(answer) as model:
        env = {"STEPFLEET_LEASE": "30"}
        worker = FleetWorker(folder, redis_server.url, model.url, env=env)
        commands = CommandLine(folder, STEPFLEET_REDIS_URL=redis_server.url, COLUMNS="300")
        try:
            worker.start()
            with Fleet(redis_server.url) as fleet:
                yield Stopped(ended(fleet, model), commands)
        finally:
            worker.end()
            commands.end()


def ended(fleet: Fleet, model: ModelServer) -> dict[StopReason, AgentRunResult]:
    runs = {
        reason: fleet.submit(AGENTS[case.agent], f"{reason} please", **case.overrides)
        for reason, case in CASES.items()
    }
    held = f"{StopReason.USER_REQUESTED} please"
    wait_until(lambda: model.count(held, turn=2), within=LONG, what="a second call to break off")
    fleet.runs.cancel(runs[StopReason.USER_REQUESTED])
    return {reason: fleet.runs.wait(run_id, timeout=LONG) for reason, run_id in runs.items()}


def test_every_stop_reason_there_is_has_a_case() -> None:
    assert set(CASES) == set(StopReason)


@pytest.mark.parametrize("reason", StopReason)
def test_a_run_stops_for_the_reason_and_its_status_follows_from_it(
    stopped: Stopped, reason: StopReason
) -> None:
    """RUN-04, STATE-10, CONT-28: one real run per stop reason."""
    result = stopped.results[reason]

    assert result.stop_reason is reason, result.explain()
    assert result.status is CASES[reason].status
    assert result.lifecycle is CASES[reason].lifecycle
    assert (result.error is not None) is (result.status is RunStatus.ERROR)


@pytest.mark.parametrize("reason", StopReason)
def test_explain_names_the_reason_and_every_criterion_with_its_numbers(
    stopped: Stopped, reason: StopReason
) -> None:
    """CONT-28, OBS-06: which criterion stopped the agent is visible without reading code."""
    result, case = stopped.results[reason], CASES[reason]

    done = stopped.stepfleet("explain", result.run_id)

    assert done.returncode == 0, done.stderr
    head, *table = done.stdout.splitlines()
    assert f"stopped with reason {reason}" in head
    assert f"({result.steps_used} step" in head
    decisive = [line for line in table if line.startswith("→")]
    assert any(case.criterion in line and case.numbers in line for line in decisive), done.stdout
    if reason is not StopReason.COMPLETED:
        assert len(decisive) == 1
    assert result.outcome is not None
    assert len(result.outcome.evaluations) > len(decisive)
    for evaluation in result.outcome.evaluations:
        (line,) = [one for one in table if f" {evaluation.criterion} " in one]
        assert evaluation.decision.value in line
        assert all(f"{to_snake(name)}=" in line for name in evaluation.context)
