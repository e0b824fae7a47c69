"""Calls that wait for people, decided in Flower, in a real browser over a real worker."""

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from support.browser import LONG, Visitor
from support.deadlines import wait_until
from support.servers.flower_site import Site

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing import ModelServer, Reply, RequestRecord, ToolCallReply

pytestmark = pytest.mark.timeout(600)
FILE = Path(__file__).parents[1] / "agent_modules" / "careful_agents.py"
CLERK = load_agents(str(FILE))["clerk"]
EVIL = "<img src=x onerror=document.title='pwned'>"


def rules(request: RequestRecord) -> Reply:
    """Refund, or ask, what the input says; then repeat what came of it."""
    if request.turn > 1:
        results = [str(m["content"]) for m in request.body["messages"] if m["role"] == "tool"]
        return Reply("; ".join(results))
    if request.key == "ask":
        call = ToolCallReply("ask_person", {"question": f"which? {EVIL}", "options": ["red", EVIL]})
    else:
        call = ToolCallReply("refund", {"customer": EVIL, "usd": 300.0})
    return Reply("", tool_calls=(call,))


def test_equal_calls_are_approved_together_and_a_question_is_answered(
    chromium: Browser,
    site: Site,
    fleet: Fleet,
    model: ModelServer,
    start_worker: Any,
    effects: Path,
) -> None:
    """Who decided is in the trace; nothing that a model wrote is HTML."""
    model.follow(rules)
    start_worker(env={"STEPFLEET_AGENTS": str(FILE), "EFFECTS": str(effects)})
    given = [{"id": f"{n}", "input": "refund"} for n in range(5)]
    batch = fleet.submit_batch(given, agent=CLERK)
    question = fleet.submit(CLERK, "ask")
    wait_until(lambda: len(list(fleet.approvals.all())) == 6, within=LONG / 1000, what="six calls")

    visitor = Visitor(chromium, site)
    page = visitor.open("/approvals")
    rows = page.locator("table tbody tr")
    expect(rows).to_have_count(2)
    refunds = rows.filter(has_text="refund")
    expect(refunds).to_contain_text("5")
    assert visitor.barriers() == []
    assert not visitor.is_too_wide()
    refunds.get_by_role("button", name="Approve").click()
    page.locator("dialog[open] button[type=submit]").click()
    expect(page.locator("#toast-container")).to_contain_text("5 decided")
    batch.wait(LONG / 1000)
    (asked,) = (one for one in fleet.approvals.all() if one.run_id == question)
    assert asked.kind == "question"
    expect(rows).to_have_count(1)
    assert page.title() == "Approvals · Flower"
    page = visitor.open(f"/runs/{question}")
    card = page.get_by_label("Waits for a person: ask_person")
    expect(card).to_contain_text(EVIL)
    assert visitor.barriers() == []
    card.get_by_role("button", name="Answer").click()
    page.locator("dialog[open] select").select_option("red")
    page.locator("dialog[open] button[type=submit]").click()
    expect(page.locator("article").first).to_contain_text("answered by me")
    assert fleet.runs.wait(question, timeout=LONG / 1000).output == "red"
    expect(card).to_have_count(0)
    page = visitor.open("/approvals")
    expect(rows).to_contain_text("Nothing waits")
    assert visitor.complaints == []
    decided = [result.steps[0].tool_calls[0].decision for result in batch.results()]
    assert {one.by for one in decided if one} == {"me"}
    assert len(effects.read_text().splitlines()) == 5


def test_what_has_not_changed_stays_where_a_reader_is_about_to_press_it(
    chromium: Browser, site: Site, fleet: Fleet
) -> None:
    first = fleet.submit(CLERK, "one")
    visitor = Visitor(chromium, site)
    page = visitor.open("/runs")
    expect(page.locator(f"#pick-{first}")).to_have_count(1)
    page.evaluate("id => { window.kept = document.getElementById(`pick-${id}`) }", first)
    second = fleet.submit(CLERK, "two")
    expect(page.locator(f"#pick-{second}")).to_have_count(1)
    assert page.evaluate("window.kept.isConnected")
    page.evaluate("window.kept.click()")
    expect(page.get_by_text("1 selected.")).to_be_visible()
    page = visitor.open(f"/runs/{first}")
    expect(page.locator("#act-cancel")).to_have_count(1)
    page.evaluate("window.kept = document.getElementById('act-cancel')")
    fleet.runs.pause(first)
    expect(page.locator("#act-resume")).to_have_count(1)
    assert page.evaluate("window.kept.isConnected")
    page.evaluate("window.kept.click()")
    expect(page.locator("dialog[open]")).to_contain_text("Cancel this run?")
    page.keyboard.press("Escape")
    page = visitor.open("/runs/%")
    expect(page.locator("#content")).to_contain_text("there is no such resource")


def hand_down(request: RequestRecord) -> Reply:
    """Have the clerk do what `desk` is asked for; the clerk does what its own input says."""
    if not request.key.startswith("desk "):
        return rules(request)
    if request.turn > 1:
        return Reply("done")
    return Reply("", tool_calls=(ToolCallReply("clerk", {"input": request.key[5:]}),))


def test_the_page_of_a_run_has_those_below_it_and_decides_their_calls(
    chromium: Browser,
    site: Site,
    fleet: Fleet,
    model: ModelServer,
    start_worker: Any,
    effects: Path,
    tmp_path: Path,
) -> None:
    """A run that waits for a run says for which person that one waits."""
    module = tmp_path / "desk_agents.py"
    desk = "desk = Agent('desk', model='openai:scripted', agents=[clerk], time_limit=None)"
    module.write_text(f"{FILE.read_text(encoding='utf-8')}\n\n{desk}\n", encoding="utf-8")
    model.follow(hand_down)
    start_worker(env={"STEPFLEET_AGENTS": str(module), "EFFECTS": str(effects)})
    top = fleet.submit("desk", "desk refund")
    wait_until(lambda: len(list(fleet.approvals.all())) == 1, within=LONG / 1000, what="a call")

    visitor = Visitor(chromium, site)
    page = visitor.open(f"/runs/{top}")
    card = page.get_by_label("Waits for a person: refund")
    expect(card).to_contain_text("Below it clerk waits for a person")
    expect(card).to_contain_text('"usd": 300')
    below = page.get_by_role("region", name="Runs below").locator("tbody tr")
    expect(below).to_contain_text("in progress")
    assert visitor.barriers() == []
    card.get_by_role("button", name="Approve").click()
    page.locator("dialog[open] button[type=submit]").click()
    assert fleet.runs.wait(top, timeout=LONG / 1000).output == "done"
    expect(below).to_contain_text("completed")
    expect(card).to_have_count(0)
