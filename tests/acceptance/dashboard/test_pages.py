"""Our pages in Flower, in a real browser over a real fleet: the story of a batch that failed."""

import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from support.browser import LONG, Visitor
from support.servers.flower_site import Site, restart_flower
from support.workers.command_line import CommandLine

from stepfleet.orchestrator import Agent, Fleet
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, Reply
from stepfleet.worker.testing.server import ModelServer

pytestmark = pytest.mark.timeout(600)
EVIL = "<img src=x onerror=document.title='pwned'>\"'\u202e</script>"
LISTS = ("/runs", "/batches", "/approvals", "/fleet", "/costs")
RIGHTMOST = """() => Math.max(...[...document.querySelectorAll(".sf-stacks td")]
  .map((one) => one.getBoundingClientRect().right))"""
"""Where the cells end of tables that stack."""
LINES = 40
BAD = 4


class Script:
    """What the model does: every tenth question fails until somebody has mended it."""

    mended = False

    def __call__(self, request: RequestRecord) -> Reply | Fault:
        is_bad = "bad" in request.question and not self.mended
        return Fault("unauthorized") if is_bad else Reply(f"fine {EVIL}")


def submitted(fleet: Fleet, tenant: str = "acme") -> Any:
    agent = Agent("plain", model="openai:gpt-4o-mini")
    lines = [
        {"id": f"q-{number} {EVIL}", "input": f"{'bad' if number % 10 == 0 else 'good'} {EVIL}"}
        for number in range(LINES)
    ]
    return fleet.submit_batch(lines, agent=agent, tenant=tenant)


def rows(page: Page) -> Any:
    return page.locator("table tbody tr")


def test_the_failed_runs_of_a_batch_are_found_by_error_and_retried(
    chromium: Browser, site: Site, fleet: Fleet, model: ModelServer, start_worker: Any
) -> None:
    """Nothing that came from a model, an input or a tenant is ever HTML; all pages are usable."""
    script = Script()
    model.follow(script)
    start_worker()
    batch = submitted(fleet)
    batch.wait(LONG / 1000)
    visitor = Visitor(chromium, site)

    alone = fleet.submit(Agent("plain", model="openai:gpt-4o-mini"), "of no tenant")
    page = visitor.open("/runs")
    page.get_by_label("Without a tenant").check()
    page.get_by_role("button", name="Filter", exact=True).click()
    expect(rows(page)).to_have_count(1)
    expect(rows(page)).to_contain_text(alone[:8])
    expect(page.get_by_label("Without a tenant")).to_be_checked()
    page = visitor.open(f"/runs?batch={batch.id}&status=failed&error=401")
    expect(rows(page)).to_have_count(BAD)
    expect(rows(page).first).to_contain_text(f"q-{LINES - 10} <img")
    script.mended = True
    page.get_by_label("Select all runs of this page").check()
    page.get_by_role("button", name="Select all runs of this filter").click()
    page.get_by_role("button", name="Retry").click()
    page.locator("dialog[open] button[type=submit]").click()
    expect(page.locator("#toast-container")).to_contain_text(str(BAD))
    page.goto(f"http://127.0.0.1:{site.port}/runs?batch={batch.id}&status=completed")
    expect(rows(page)).to_have_count(LINES)
    assert batch.progress().completed == LINES

    run_id = fleet.runs.find(f"q-0 {EVIL}", batch.id)
    for path in (*LISTS, f"/runs/{run_id}", f"/batches/{batch.id}"):
        visitor.open(path)
        assert visitor.barriers() == [], path
        assert not visitor.is_too_wide(), path
    assert page.title() == "Batch · Flower"
    assert visitor.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone_in_light_and_in_dark(
    chromium: Browser,
    site: Site,
    fleet: Fleet,
    model: ModelServer,
    start_worker: Any,
    scheme: str,
) -> None:
    script = Script()
    model.follow(script)
    start_worker()
    batch = submitted(fleet, "acme")
    batch.wait(LONG / 1000)
    small = {"width": 375, "height": 812}
    visitor = Visitor(chromium, site, viewport=small, color_scheme=scheme)
    for path, column in (("/batches", "Cost"), ("/fleet", "Queues")):
        expect(visitor.open(path).locator(f"td[data-name={column}]").first).to_be_visible()
        assert 0 < visitor.page.evaluate(RIGHTMOST) <= small["width"]
    run_id = fleet.runs.find(f"q-0 {EVIL}", batch.id)
    for path in (*LISTS, f"/runs/{run_id}", f"/batches/{batch.id}"):
        visitor.open(path)
        assert visitor.barriers() == [], path
        assert not visitor.is_too_wide(), path
    assert visitor.complaints == []


def test_a_run_is_explained_goes_on_with_a_message_and_is_forked(
    chromium: Browser, site: Site, fleet: Fleet, model: ModelServer, start_worker: Any
) -> None:
    model.follow(lambda request: Reply(f"answer {len(request.messages)} {'<b>' * 1_000}"))
    start_worker()
    run_id = fleet.submit(Agent("plain", model="openai:gpt-4o-mini"), "how many?")
    fleet.runs.wait(run_id, LONG / 1000)
    visitor = Visitor(chromium, site)
    page = visitor.open(f"/runs/{run_id}")
    expect(page.locator("#content")).to_contain_text("completed")
    expect(page.locator("article")).to_have_count(1)

    with page.expect_download() as download:
        page.get_by_role("link", name="Download the full text: step 1, text").click()
    assert download.value.suggested_filename == f"run-{run_id}-step-1-text.txt"
    assert download.value.path().read_text() == f"answer 1 {'<b>' * 1_000}"

    page.get_by_role("button", name="Send").click()
    page.get_by_role("textbox", name="Message").fill("and of pears?")
    page.locator("dialog[open] button[type=submit]").click()
    expect(page.locator("article")).to_have_count(2)

    page.get_by_role("button", name="Fork").click()
    page.locator("dialog[open] button[type=submit]").click()
    page.wait_for_url(re.compile(r"\?beside="))
    expect(page.locator("#content")).to_contain_text("the other")
    assert visitor.complaints == []
    _, done = site.api("/audit")
    assert {one["action"] for one in done["entries"]} == {"send", "fork"}


def test_a_button_that_is_pressed_while_its_part_is_drawn_anew_is_clicked(
    chromium: Browser, site: Site, fleet: Fleet
) -> None:
    page = Visitor(chromium, site).open("/fleet")
    pressed = page.get_by_role("button", name="Set a limit")
    expect(pressed).to_be_visible()
    pressed.hover()
    page.mouse.down()
    with page.expect_response("**/api/stepfleet/fleet") as answered:
        fleet.limits.set("tenant:acme", calls=7)
    answered.value.finished()
    page.evaluate("() => new Promise((done) => setTimeout(() => requestAnimationFrame(done)))")
    page.mouse.up()
    expect(page.locator("dialog[open]")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("region", name="Limits of the fleet")).to_contain_text("tenant:acme")


def test_a_limit_is_set_and_the_fleet_is_paused_from_the_page(
    chromium: Browser, site: Site, fleet: Fleet
) -> None:
    visitor = Visitor(chromium, site)
    page = visitor.open("/fleet")
    expect(page.locator("#content")).to_contain_text("none alive")
    page.get_by_role("button", name="Set a limit").click()
    page.get_by_label("Name, as").fill("tenant:acme")
    page.get_by_label("requests per minute").fill("1,000")
    page.locator("dialog[open] button[type=submit]").click()
    expect(page.locator("dialog[open] [role=alert]")).to_contain_text('"1,000" is not a number')
    assert not fleet.limits.all()
    page.get_by_label("requests per minute").fill("60")
    page.get_by_label("usd per day").fill("2")
    page.get_by_label("on budget").select_option("hold")
    page.locator("dialog[open] button[type=submit]").click()
    limits = page.get_by_role("region", name="Limits of the fleet")
    expect(limits).to_contain_text("requests per minute 60 (1 of 1 free now)")
    limit = fleet.limits.all()["tenant:acme"]
    assert (limit.requests_per_minute, limit.usd_per_day, limit.on_budget) == (60, 2, "hold")
    limits.get_by_role("button", name="Change").click()
    page.get_by_label("requests per minute").fill("")
    page.locator("dialog[open] button[type=submit]").click()
    expect(limits).not_to_contain_text("requests per minute")
    assert fleet.limits.all()["tenant:acme"].usd_per_day == 2
    limits.get_by_role("button", name="Remove").click()
    page.locator("dialog[open] button[type=submit]").click()
    expect(limits).to_contain_text("No limit is set")
    assert not fleet.limits.all()
    page.get_by_role("button", name="Pause the fleet").click()
    page.keyboard.press("Escape")
    assert not fleet.overview().paused, "nobody has agreed"
    page.get_by_role("button", name="Pause the fleet").click()
    page.locator("dialog[open] button[type=submit]").click()
    expect(page.get_by_role("button", name="Resume the fleet")).to_be_visible()
    assert fleet.overview().paused
    fleet.resume()
    expect(page.get_by_role("button", name="Pause the fleet")).to_be_visible()
    assert visitor.complaints == []


def test_a_file_is_checked_submitted_and_its_failures_retried_by_cause_also_over_a_restart(
    chromium: Browser,
    site: Site,
    commands: CommandLine,
    redis_url: str,
    fleet: Fleet,
    model: ModelServer,
    start_worker: Any,
) -> None:
    """An open page goes on when Flower has been away."""
    script = Script()
    model.follow(script)
    start_worker()
    questions = ["bad one", *(f"good {number}" for number in range(9))]
    lines = [f'{{"id": "l{at}", "input": "{one}"}}' for at, one in enumerate(questions)]
    file = commands.write("lines.jsonl", "\n".join([*lines, "{broken"]))
    visitor = Visitor(chromium, site)
    page = visitor.open("/batches")
    page.get_by_text("Submit a batch").click()
    page.get_by_label("File").set_input_files(file)
    page.get_by_label("Agent").select_option("plain")
    page.get_by_role("button", name="Check the file").click()
    expect(page.locator("#content")).to_contain_text("10 of 11 lines are good")
    page.get_by_role("button", name="Submit 10 runs").click()
    page.locator("dialog[open] button[type=submit]").click()
    expect(page.locator("#content")).to_contain_text("completed: 9")
    expect(page.get_by_role("button", name="Retry these")).to_be_visible()
    assert visitor.complaints == []

    restart_flower(commands, site, redis_url)
    script.mended = True
    page.get_by_role("button", name="Retry these").click()
    page.locator("dialog[open] button[type=submit]").click()
    expect(page.locator("#content")).to_contain_text("completed: 10")
