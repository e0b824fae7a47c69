"""The story of docs/flower.md at its size: 20 of 5,000 runs failed, while servers come and go."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from support.browser import Visitor
from support.deadlines import wait_until
from support.servers.flower_site import restart_flower, started_flower
from support.servers.redis_servers import RedisServer
from support.workers.command_line import CommandLine

from stepfleet.orchestrator import Agent, Fleet
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, Reply
from stepfleet.worker.testing.server import ModelServer

RUNS = int(os.environ.get("FLOWER_RUNS", "5000"))
BAD = min(20, RUNS // 10)
WORKERS = ("w1", "w2")
WAVES = 25
"""Times that all slots are filled: with a second for each call, the batch lasts long enough."""
LONG = 900.0


class Script:
    """Refuses some questions for what they say, until somebody has mended it."""

    mended = False

    def __call__(self, request: RequestRecord) -> Reply | Fault:
        is_bad = int(request.question) % (RUNS // BAD) == 7 and not self.mended
        return Fault("content_filter") if is_bad else Reply("It is a lamp.", latency=1.0)


def retry_what_the_filter_finds(page: Page) -> None:
    """Find the runs by their error, and retry all of them."""
    page.get_by_label("Error contains").fill("content filter")
    page.get_by_role("button", name="Filter").click()
    expect(page.locator("table tbody tr")).to_have_count(BAD)
    page.get_by_label("Select all runs of this page").check()
    page.get_by_role("button", name="Select all runs of this filter").click()
    page.get_by_role("button", name="Retry").click()
    page.locator("dialog[open] button[type=submit]").click()
    expect(page.locator("#toast-container")).to_contain_text(f"{BAD} runs taken up again")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_20_of_5000_are_found_retried_and_complete_while_flower_and_redis_restart(
    chromium: Browser,
    commands: CommandLine,
    model: ModelServer,
    start_worker: Any,
    own_redis: Callable[..., RedisServer],
) -> None:
    """The page of the batch is open all the time, and is never loaded again: FLOWER_RUNS=200."""
    script = Script()
    model.follow(script)
    redis = own_redis()
    slots = str(max(RUNS // WAVES // len(WORKERS), 1))
    for name in WORKERS:
        start_worker(redis.url, name=name, env={"STEPFLEET_SLOTS": slots})
    site = started_flower(commands, redis.url)
    agent = Agent("plain", model="openai:gpt-4o-mini")
    with Fleet(redis.url) as fleet:
        lines = [{"id": f"sku-{number}", "input": str(number)} for number in range(RUNS)]
        batch = fleet.submit_batch(lines, agent=agent, name="catalog")

        def until_ended(runs: int) -> None:
            ended = "a part of the runs ended"
            wait_until(lambda: batch.progress().done >= runs, within=LONG, what=ended)

        visitor = Visitor(chromium, site)
        page = visitor.open(f"/batches/{batch.id}")
        page.evaluate("window.isTheSame = true")
        until_ended(RUNS // 4)
        restart_flower(commands, site, redis.url)
        assert not batch.progress().ended
        until_ended(RUNS // 2)
        redis.restart()
        assert not batch.progress().ended
        expect(page.locator("#content")).to_contain_text(
            f"completed: {RUNS - BAD:,}", timeout=LONG * 1000
        )
        expect(page.get_by_role("region", name="Causes")).to_contain_text("CONTENT_FILTER")

        script.mended = True
        other = visitor.context.new_page()
        other.goto(f"http://127.0.0.1:{site.port}/runs?batch={batch.id}&status=failed")
        retry_what_the_filter_finds(other)
        expect(other.locator("table tbody")).to_contain_text("No run matches")
        expect(page.locator("#content")).to_contain_text(f"completed: {RUNS:,}")
        expect(page.get_by_role("region", name="Causes")).to_have_count(0)
        assert page.evaluate("window.isTheSame"), "the page recovered by itself"
        assert batch.progress().completed == RUNS
        away = ("Failed to load resource", "net::ERR")
        assert [one for one in visitor.complaints if not any(word in one for word in away)] == []
