"""The fleet's figures as a metric: read again and again, whatever goes wrong."""

import asyncio

import pytest

from stepfleet.orchestrator.store.fleet.figures import FleetFigures
from stepfleet.worker.telemetry import instrumentation


async def test_a_reading_that_fails_unexpectedly_shows_none_and_the_next_one_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instrumentation, "FLEET_SECONDS", 0.05)
    figures = FleetFigures.model_validate(
        {
            **dict.fromkeys(FleetFigures.model_fields, 3),
            "limits": (),
            "work": {},
            "capacity": {},
            "archive": None,
        }
    )
    answers: list[FleetFigures | Exception] = [ValueError("not a number"), figures]
    shown: list[FleetFigures | None] = []
    both = asyncio.Event()

    async def fleet() -> FleetFigures:
        answer = answers.pop(0) if answers else figures
        if isinstance(answer, Exception):
            raise answer
        return answer

    def show(one: FleetFigures | None) -> None:
        shown.append(one)
        if len(shown) == 2:
            both.set()

    reading = asyncio.create_task(instrumentation.read_fleet(fleet, show))
    await asyncio.wait(
        [reading, asyncio.create_task(both.wait())], timeout=30, return_when="FIRST_COMPLETED"
    )
    reading.cancel()
    assert shown[:2] == [None, figures]
