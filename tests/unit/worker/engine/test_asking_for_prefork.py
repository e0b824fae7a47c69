"""Celery cannot tell `-P prefork` from its default; the worker's app can."""

import pytest

from stepfleet.worker.app import asks_for_prefork


@pytest.mark.parametrize(
    "arguments",
    [
        ["celery", "worker", "-P", "prefork"],
        ["celery", "worker", "--pool", "prefork", "-c", "4"],
        ["celery", "worker", "--pool=prefork"],
        ["celery", "worker", "-Pprefork"],
    ],
)
def test_every_way_to_name_prefork_is_understood(arguments: list[str]) -> None:
    assert asks_for_prefork(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["celery", "worker"],
        ["celery", "worker", "-P", "threads"],
        ["celery", "worker", "-n", "prefork"],
        ["celery", "worker", "prefork", "-P"],
    ],
)
def test_other_command_lines_keep_the_asyncio_pool(arguments: list[str]) -> None:
    assert not asks_for_prefork(arguments)
