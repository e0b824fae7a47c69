"""Pages of runs and batches that wait for others, and of batches whose runs are gone, in Flower."""

from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from support.browser import LONG, Visitor
from support.servers.flower_site import Site

from stepfleet.orchestrator import Agent, Fleet
from stepfleet.worker.testing.scenario import Fault, Reply
from stepfleet.worker.testing.server import ModelServer

pytestmark = pytest.mark.timeout(600)
PLAIN = Agent("plain", model="openai:gpt-4o-mini")


def test_a_run_names_the_runs_that_it_waits_for_and_a_paused_fleet(
    chromium: Browser, site: Site, fleet: Fleet
) -> None:
    """The page follows both by itself."""
    first, second = fleet.submit(PLAIN, "one"), fleet.submit(PLAIN, "two")
    last = fleet.submit(PLAIN, "three", after=[first, second])
    found = fleet.runs.timeline(last)
    assert found.before == {first: "queued", second: "queued"}
    visitor = Visitor(chromium, site)
    page = visitor.open(f"/runs/{last}")
    content = page.locator("#content")
    expect(content).to_contain_text("Step 1 waits for the ends of 2 runs: ")
    fleet.runs.pause(second)
    expect(content).to_contain_text(f"{second} (paused)")
    expect(content).not_to_contain_text("fleet is paused")
    fleet.pause()
    expect(content).to_contain_text("The whole fleet is paused: no step begins")
    assert visitor.barriers() == []
    fleet.resume()
    expect(content).not_to_contain_text("fleet is paused")
    page.get_by_role("link", name=first).click()
    expect(page.locator("h2").first).to_have_text(first)
    expect(content).not_to_contain_text("waits for")
    assert visitor.complaints == []


def test_a_batch_names_those_before_and_behind_it_and_offers_no_retry_of_runs_that_are_gone(
    chromium: Browser, site: Site, fleet: Fleet, model: ModelServer, start_worker: Any
) -> None:
    model.follow(lambda one: Fault("unauthorized") if "bad" in one.question else Reply("fine"))
    batch = fleet.submit_batch([{"input": one} for one in ("bad 1", "bad 2", "good")], PLAIN)
    following = batch.then(PLAIN, "look at {output}")
    visitor = Visitor(chromium, site)
    page = visitor.open(f"/batches/{following.id}")
    expect(page.locator("#content")).to_contain_text("waits for the batch before it")
    page.get_by_role("link", name=batch.id).click()
    page.wait_for_url(f"**/batches/{batch.id}")
    expect(page.get_by_role("link", name=following.id)).to_be_visible()

    start_worker()
    batch.wait(LONG / 1000)
    retry = page.get_by_role("button", name="Retry …", exact=True)
    expect(retry).to_be_visible()
    assert fleet.runs.purge(batch=batch.id, statuses=["failed"]) == 2
    page = visitor.open(f"/batches/{batch.id}")
    expect(page.locator("#content")).to_contain_text("Of 2 runs, 2 are not there any more")
    expect(retry).to_have_count(0)
    expect(page.get_by_role("region", name="Causes")).to_have_count(0)
    assert visitor.barriers() == []
    page.get_by_role("link", name=following.id).click()
    page.wait_for_url(f"**/batches/{following.id}")
    expect(page.locator("#content")).to_contain_text("2 runs of that batch without a result")
    assert visitor.complaints == []
