"""Fixtures of Flower's pages: a browser, and a Flower of our own."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser
from support.browser import browser
from support.servers.flower_site import Site, started_flower
from support.workers.command_line import CommandLine


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for the tests of a module: its driver keeps an event loop in this thread."""
    with browser() as made:
        yield made


@pytest.fixture
def site(redis_url: str, commands: CommandLine) -> Site:
    """`stepfleet flower` on the session's Redis, with a password."""
    return started_flower(commands, redis_url)
