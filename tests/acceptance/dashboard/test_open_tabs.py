"""Tabs that stay open while much happens: neither they nor Flower hold on to anything."""

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from playwright.sync_api import Browser, CDPSession, Page, expect
from support.browser import Visitor
from support.deadlines import wait_until
from support.servers.flower_site import Site, restart_flower, started_flower
from support.servers.redis_servers import RedisServer
from support.workers.command_line import CommandLine

from stepfleet.orchestrator import Agent, Batch, Fleet
from stepfleet.orchestrator.store.batches.batches import run_id_of

CHANGES = int(os.environ.get("FLOWER_CHANGES", "10000"))
AT_ONCE = 50
LONG = 60.0
PAGES = ("/runs", "/batches", "/fleet")
MEGABYTE = 2**20


class Tab:
    """A page, and what Chromium holds for it."""

    def __init__(self, visitor: Visitor, path: str) -> None:
        self.page: Page = visitor.context.new_page()
        self.page.goto(f"http://127.0.0.1:{visitor.site.port}{path}")
        expect(self.page.locator("#content .table-responsive").first).to_be_visible()
        self.page.evaluate("window.isTheSame = true")
        self._tools: CDPSession = visitor.context.new_cdp_session(self.page)

    def held(self) -> dict[str, float]:
        """Return memory in bytes, nodes and listeners after a collection."""
        self._tools.send("HeapProfiler.collectGarbage")
        found = self._tools.send("Memory.getDOMCounters")
        heap = self._tools.send("Runtime.getHeapUsage")["usedSize"]
        return {"heap": heap, "nodes": found["nodes"], "listeners": found["jsEventListeners"]}


def cancelled(fleet: Fleet, agent: Agent) -> Batch:
    """Create, pause, resume and cancel some runs; return their batch."""
    lines = [{"id": str(at), "input": "x"} for at in range(AT_ONCE)]
    batch = fleet.submit_batch(lines, agent=agent, idempotency_key=str(time.monotonic_ns()))
    batch.pause()
    batch.resume()
    batch.cancel()
    return batch


def change(fleet: Fleet, agent: Agent, changes: int) -> Batch:
    """Change states of runs so many times; return the newest batch."""
    return [cancelled(fleet, agent) for _ in range(changes // (4 * AT_ONCE))][-1]


def shown(tabs: Sequence[Tab], newest: Batch) -> None:
    """Wait until the tabs show the newest batch and its runs, and no tab changes any more."""
    runs = "|".join(run_id_of(newest.id, row)[:8] for row in range(AT_ONCE))
    expect(tabs[0].page.locator("table tbody tr").first).to_contain_text(re.compile(runs))
    expect(tabs[1].page.locator("table tbody tr").first).to_contain_text(newest.id[:8])

    def held() -> list[tuple[float, float]]:
        return [(one["nodes"], one["listeners"]) for one in (tab.held() for tab in tabs)]

    wait_until(lambda: held() == held(), within=LONG, what="tabs that rest")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_tabs_that_stay_open_hold_on_to_nothing_also_over_restarts(
    chromium: Browser, commands: CommandLine, own_redis: Callable[..., RedisServer]
) -> None:
    """FLOWER_CHANGES=2000. A tenth of the changes warms all up; figures are compared from then."""
    redis = own_redis()
    site: Site = started_flower(commands, redis.url)
    agent = Agent("plain", model="openai:gpt-4o-mini")
    (flower,) = commands.running("stepfleet.orchestrator.cli")
    visitor = Visitor(chromium, site)
    with Fleet(redis.url) as fleet:
        tabs: list[Any] = [Tab(visitor, path) for path in PAGES]
        shown(tabs, change(fleet, agent, max(CHANGES // 10, 800)))
        before = [tab.held() for tab in tabs]
        memory = flower.memory_info().rss
        shown(tabs, change(fleet, agent, CHANGES))
        after = [tab.held() for tab in tabs]
        grown = flower.memory_info().rss - memory
        for path, first, then in zip(PAGES, before, after, strict=True):
            sys.stdout.write(f"{path}: {first} before, {then} after {CHANGES} changes\n")
        sys.stdout.write(f"Flower's memory grew by {grown / 1e6:.1f} MB\n")
        for first, then in zip(before, after, strict=True):
            assert then["heap"] < first["heap"] + 2 * MEGABYTE
            assert then["nodes"] < 2 * first["nodes"] + 500
            assert then["listeners"] < 2 * first["listeners"] + 100
        assert grown < 30 * MEGABYTE

        redis.restart()
        restart_flower(commands, site, redis.url)
        shown(tabs, change(fleet, agent, 800))
        newest = fleet.submit(agent, "the newest")
        expect(tabs[0].page.locator("table tbody tr").first).to_contain_text(newest[:8])
        fleet.pause()
        expect(tabs[2].page.get_by_role("button", name="Resume the fleet")).to_be_visible()
        assert all(tab.page.evaluate("window.isTheSame") for tab in tabs)
        (flower,) = commands.running("stepfleet.orchestrator.cli")
        open_streams = [
            one
            for one in flower.net_connections("tcp")
            if one.status == "ESTABLISHED" and one.laddr.port == site.port
        ]
        sys.stdout.write(f"{len(open_streams)} connections of {len(tabs)} tabs\n")
        # A browser keeps up to six connections to a server, streams among them.
        assert len(open_streams) <= 6
