"""What `status` and `workers` print of workers."""

import pytest
from rich.console import Console, RenderableType

from stepfleet.orchestrator.cli.look import fleet_picture, workers_picture
from stepfleet.orchestrator.store.fleet.overview import FleetOverview, WorkerSeen

AGENTS = tuple(f"researcher-{number}" for number in range(12))
GONE = WorkerSeen(
    name="w1@operator-host",
    seen_seconds_ago=1200.0,
    slots=200,
    alive=False,
    agents=AGENTS,
    queues=("stepfleet", "gpu"),
)


OVERVIEW = FleetOverview(
    redis_version="7", active=1, queue_length=0, oldest_due_seconds=0.0, workers=(GONE,)
)
PICTURES = pytest.mark.parametrize(
    "shown", [fleet_picture((OVERVIEW, [])), workers_picture([GONE])], ids=["status", "workers"]
)


def printed(shown: RenderableType, width: int) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


@PICTURES
@pytest.mark.parametrize("width", [60, 80, 120])
def test_all_agents_are_named_whole_on_terminals_of_any_width(
    shown: RenderableType, width: int
) -> None:
    words = {word.strip(",") for word in printed(shown, width).split()}
    assert {"w1@operator-host", *AGENTS} <= words


@PICTURES
def test_both_commands_say_in_one_word_that_a_worker_is_gone(shown: RenderableType) -> None:
    assert "silent for 20 min 00 s" in printed(shown, 200)


def test_workers_are_shown_with_the_queues_that_they_serve() -> None:
    assert "queues stepfleet, gpu" in printed(workers_picture([GONE]), 80)
