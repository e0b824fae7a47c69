"""Calls that wait for people, decided in Flower, in a real browser over a real worker."""

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from support.browser import LONG, Visitor
from support.deadlines import wait_until
from support.servers.flower_site import Site

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

pytestmark = pytest.mark.timeout(600)
FILE = Path(__file__).parents[1] / "agent_modules" / "careful_agents.py"
CLERK = load_agents(str(FILE))["clerk"]
EVIL = "<img src=x onerror=document.title='pwned'>"
TURNED = "\u202egnp\u2066.exe\u200b\x7f"
SEEN = "\ufffdgnp\ufffd.exe\ufffd\ufffd"
UNSEEN = re.compile("[\u202a-\u202e\u2066-\u2069\u200b\x7f]")
READABLE = """() => {
  const all = [...document.querySelectorAll("*")];
  const names = ["title", "aria-label", "placeholder"];
  const labels = all.flatMap((one) => names.map((name) => one.getAttribute(name) || ""));
  const hidden = [...document.querySelectorAll("title, option, details")];
  return [document.body.innerText, ...labels, ...hidden.map((one) => one.textContent)].join("|");
}"""
"""Returns what people read on a page, also that which comes up later."""


def refund_of(customer: str) -> ToolCallReply:
    """Return a call that waits for an approval."""
    return ToolCallReply("refund", {"customer": customer, "usd": 300.0})


def rules(request: RequestRecord) -> Reply:
    """Refund, or ask, what the input says; then repeat what came of it."""
    if request.turn > 1:
        results = [str(m["content"]) for m in request.body["messages"] if m["role"] == "tool"]
        return Reply("; ".join(results))
    if request.key == "ask":
        call = ToolCallReply("ask_person", {"question": f"which? {EVIL}", "options": ["red", EVIL]})
    else:
        call = refund_of(EVIL)
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
    expect(below).to_contain_text("$")
    expect(page.locator("article").first).to_contain_text("clerk · its run took")
    total = page.locator("dl div", has_text="In total")
    expect(total).to_contain_text("$")
    expect(card).to_have_count(0)


def test_a_page_that_has_not_read_all_says_so_and_its_filter_holds_for_decisions(
    chromium: Browser,
    site: Site,
    fleet: Fleet,
    model: ModelServer,
    start_worker: Any,
    effects: Path,
) -> None:
    """The row and the question count what was read; the audit names the tool, the agent, all."""
    model.follow(rules)
    start_worker(env={"STEPFLEET_AGENTS": str(FILE), "EFFECTS": str(effects)})
    batch = fleet.submit_batch([{"input": "refund"}] * 12, agent=CLERK)
    wait_until(lambda: len(list(fleet.approvals.all())) == 12, within=LONG / 1000, what="calls")
    other = fleet.submit(CLERK, "refund")
    wait_until(lambda: len(list(fleet.approvals.all())) == 13, within=LONG / 1000, what="calls")

    visitor = Visitor(chromium, site)
    page = visitor.open(f"/batches/{batch.id}")
    page.get_by_role("link", name="12 calls").click()
    row = page.locator("table tbody tr")
    expect(row.locator("td").first).to_have_text("12")
    expect(page.get_by_label("Batch")).to_have_value(batch.id)

    # Ten small pages have a part of it only.
    pages = re.compile(r"/api/stepfleet/approvals\?")
    visitor.page.route(pages, lambda one: one.continue_(url=f"{one.request.url}&limit=1"))
    page = visitor.open(f"/approvals?batch={batch.id}")
    expect(row.locator("td").first).to_have_text("at least 10")
    expect(page.locator("dl")).to_contain_text("Waiting in the fleet13")
    row.get_by_role("button", name="Approve").click()
    question = page.locator("dialog[open]")
    expect(question).to_contain_text("match the filter: at least 10 when this page was read")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Show more").click()
    expect(row.locator("td").first).to_have_text("12")
    expect(page.get_by_role("button", name="Show more")).to_have_count(0)
    row.get_by_role("button", name="Approve").click()
    page.locator("dialog[open] button[type=submit]").click()
    expect(page.locator("#toast-container")).to_contain_text("12 decided")
    expect(page.locator("#content")).to_contain_text("No call of this filter waits")
    assert [one.run_id for one in fleet.approvals.all()] == [other]
    fleet.submit_batch([{"input": "refund"}] * 10, agent=CLERK)
    wait_until(lambda: len(list(fleet.approvals.all())) == 11, within=LONG / 1000, what="calls")
    last = fleet.submit_batch([{"input": "ask"}], agent=CLERK)
    wait_until(lambda: len(list(fleet.approvals.all())) == 12, within=LONG / 1000, what="calls")
    page = visitor.open(f"/approvals?batch={last.id}")
    expect(row).to_contain_text("None of this filter is among the")
    page.get_by_role("button", name="Show more").click()
    expect(row).to_contain_text("which?")
    assert visitor.complaints == []
    entries = site.api("/audit")[1]["entries"]
    done, begun = [one for one in entries if one["source"] == "flower"]
    assert done["target"] == begun["target"]
    assert f"batch {batch.id}, tool refund, agent clerk, group " in done["target"]
    assert '"runs":12' in done["detail"]


def test_of_many_different_calls_a_part_is_drawn(
    chromium: Browser,
    site: Site,
    fleet: Fleet,
    model: ModelServer,
    start_worker: Any,
    effects: Path,
) -> None:
    model.follow(lambda request: Reply("", tool_calls=(refund_of(request.key),)))
    start_worker(env={"STEPFLEET_AGENTS": str(FILE), "EFFECTS": str(effects)})
    fleet.submit_batch([{"input": f"c{n}"} for n in range(23)], agent=CLERK)
    wait_until(lambda: len(list(fleet.approvals.all())) == 23, within=LONG / 1000, what="calls")
    visitor = Visitor(chromium, site, viewport={"width": 390, "height": 844})
    page = visitor.open("/approvals")
    rows = page.locator("table tbody tr")
    expect(rows).to_have_count(20)
    expect(page.locator("#content")).to_contain_text("3 more rows are not shown")
    expect(rows.first.locator("td[data-name='Waits since']")).to_be_visible()
    cells = rows.first.locator("td").evaluate_all(
        "all => all.map((one) => one.getBoundingClientRect().right)"
    )
    assert max(cells) <= 390
    assert visitor.barriers() == []
    page.get_by_role("button", name="Show more").click()
    expect(rows).to_have_count(23)


def test_characters_that_turn_others_around_are_seen(
    chromium: Browser,
    site: Site,
    fleet: Fleet,
    model: ModelServer,
    start_worker: Any,
    effects: Path,
) -> None:
    """In texts, names and labels of all pages; an option that has them is answered as it is."""

    def attack(request: RequestRecord) -> Reply:
        if request.turn > 1:
            return Reply(f"{TURNED} {request.messages[-1]['content']}")
        if request.key.startswith("ask"):
            given = {"question": f"Open {TURNED}?", "options": ["no", TURNED]}
            return Reply("", tool_calls=(ToolCallReply("ask_person", given),))
        return Reply("", tool_calls=(refund_of(TURNED),))

    model.follow(attack)
    start_worker(env={"STEPFLEET_AGENTS": str(FILE), "EFFECTS": str(effects)})
    lines = [{"id": f"{n} {TURNED}", "input": f"{n} {TURNED}"} for n in ("ask", "refund")]
    batch = fleet.submit_batch(lines, agent=CLERK, name=TURNED)
    wait_until(lambda: len(list(fleet.approvals.all())) == 2, within=LONG / 1000, what="calls")
    asked = fleet.runs.find(f"ask {TURNED}", batch.id)
    visitor = Visitor(chromium, site)
    paths = ("/approvals", "/runs", "/batches", f"/batches/{batch.id}", f"/runs/{asked}", "/costs")
    for path in paths:
        page = visitor.open(path)
        if path != "/costs":
            expect(page.locator("#content, .page-header").filter(has_text=SEEN)).not_to_have_count(
                0
            )
        assert not UNSEEN.search(page.evaluate(READABLE)), path
    page = visitor.open(f"/runs/{asked}")
    page.get_by_role("button", name="Answer").click()
    assert not UNSEEN.search(page.evaluate(READABLE))
    page.locator("dialog[open] select").select_option(label=SEEN)
    page.locator("dialog[open] button[type=submit]").click()
    result = fleet.runs.wait(asked, timeout=LONG / 1000)
    assert result.output == f"{TURNED} {TURNED}"
    expect(page.locator("article")).to_have_count(2)
    assert not UNSEEN.search(page.evaluate(READABLE))
    assert visitor.complaints == []
