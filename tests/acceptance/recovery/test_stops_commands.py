"""`stepfleet up` on a Redis of others, asked to stop: its workers hand their runs back."""

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.deadlines import wait_until
from support.servers.redis_servers import short_folder
from support.workers.command_line import CommandLine
from support.workers.frozen import freeze
from support.workers.warm_starts import Forked

from stepfleet.orchestrator import Fleet
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.server import ModelServer

LONG = 90.0


@pytest.fixture
def commands(redis_url: str, model: ModelServer) -> Iterator[CommandLine]:
    """Commands that share a Redis; nobody's lease runs out within a test."""
    with short_folder() as folder:
        opened = CommandLine(
            folder,
            STEPFLEET_REDIS_URL=redis_url,
            STEPFLEET_LEASE="600",
            STEPFLEET_GRACE="600",
            OPENAI_BASE_URL=model.url,
            OPENAI_API_KEY="unused",
        )
        try:
            yield opened
        finally:
            opened.end()


def busy_fleet(
    commands: CommandLine, model: ModelServer, fleet: Fleet, drain: str
) -> tuple[Forked, str]:
    """Start `up` and a run whose model call lasts; return both."""
    model.follow(lambda request: Reply("late", latency=300.0 if request.attempt == 1 else 0.0))
    up = commands.start("up", "--agents", "agents.py", STEPFLEET_DRAIN=drain)
    commands.until_said("Ctrl-C stops it", within=LONG)
    wait_until(lambda: "alive" in commands("status").stdout, within=LONG, what="a worker")
    run_id = fleet.submit("solver", "a long question")
    wait_until(lambda: len(model.requests) == 1, within=LONG, what="the call under way")
    return up, run_id


def handed_back(fleet: Fleet, run_id: str) -> bool:
    """Whether nobody holds the run, which is not over."""
    shown = fleet.runs.show(run_id)
    kinds = [lost.kind for lost in shown.lost]
    return not shown.header["token"] and not shown.state.status.is_terminal and bool(kinds)


def test_what_the_drain_did_not_finish_is_handed_back(
    commands: CommandLine, model: ModelServer, fleet: Fleet
) -> None:
    """DIST-11: within the bound of `up`, too."""
    up, run_id = busy_fleet(commands, model, fleet, drain="0.5")

    up.send_signal(signal.SIGTERM)

    assert up.wait(timeout=LONG) == 0
    commands.until_all_ended(within=LONG)
    assert handed_back(fleet, run_id)


def test_a_second_signal_hands_back_and_ends_at_once(
    commands: CommandLine, model: ModelServer, fleet: Fleet
) -> None:
    """DIST-11"""
    up, run_id = busy_fleet(commands, model, fleet, drain="600")

    up.send_signal(signal.SIGINT)
    commands.until_said("Stopping", within=LONG)
    up.send_signal(signal.SIGINT)

    assert up.wait(timeout=LONG) == 130
    commands.until_all_ended(within=LONG)
    assert handed_back(fleet, run_id)


def test_a_worker_that_hears_both_signals_as_one_hands_back(
    commands: CommandLine, model: ModelServer, fleet: Fleet
) -> None:
    """DIST-11: signals that arrive together are one, which would only begin the drain."""
    up, run_id = busy_fleet(commands, model, fleet, drain="600")
    (worker,) = psutil.Process(up.pid).children()
    freeze(worker.pid)

    up.send_signal(signal.SIGINT)
    wait_until(lambda: has_pending(worker.pid, signal.SIGTERM), within=LONG, what="the first")
    up.send_signal(signal.SIGINT)
    wait_until(lambda: not has_pending(up.pid, signal.SIGINT), within=LONG, what="the second")
    worker.resume()

    assert up.wait(timeout=LONG) == 130
    commands.until_all_ended(within=LONG)
    assert handed_back(fleet, run_id)


def has_pending(pid: int, number: signal.Signals) -> bool:
    """Whether a signal waits to be heard by the process."""
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    pending = next(line for line in status.splitlines() if line.startswith("ShdPnd"))
    return bool(int(pending.split()[1], 16) >> (number - 1) & 1)


def test_workers_whose_starter_was_killed_hand_back(
    commands: CommandLine, model: ModelServer, fleet: Fleet
) -> None:
    """DIST-11: after a few seconds, however long the drain could last."""
    up, run_id = busy_fleet(commands, model, fleet, drain="600")

    up.send_signal(signal.SIGKILL)

    commands.until_all_ended(within=LONG)
    assert handed_back(fleet, run_id)
