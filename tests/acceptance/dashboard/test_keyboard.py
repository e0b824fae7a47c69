"""Our pages in Flower by the keyboard alone, in a real browser."""

from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from support.browser import Visitor
from support.servers.flower_site import Site

from stepfleet.orchestrator import Agent, Fleet

pytestmark = pytest.mark.timeout(300)
MOST = 120
FOCUSED = """() => {
  const one = document.activeElement;
  if (one === document.body) return null;
  const style = getComputedStyle(one);
  const place = one.getBoundingClientRect();
  return {
    name: one.getAttribute("aria-label") || (one.labels?.[0] || one).textContent.trim(),
    isMarked: style.outlineStyle !== "none" || style.boxShadow !== "none"
      || one.matches('input[type^="date"]'), // whose parts have marks of the browser's own
    isInView: place.bottom > 0 && place.top < innerHeight && place.right > 0,
    isInDialog: Boolean(one.closest("dialog[open]")),
  };
}"""


def walk(page: Page) -> list[dict[str, Any]]:
    """Return what has the focus after each press of Tab, until it has left the page."""
    found: list[dict[str, Any]] = []
    while len(found) < MOST:
        page.keyboard.press("Tab")
        one = page.evaluate(FOCUSED)
        if one is None:
            return found
        found.append(one)
    pytest.fail(f"the focus does not leave the page: {found[-3:]}")


def press(page: Page, name: str) -> None:
    """Come to a button by Tab, and press it."""
    while (page.evaluate(FOCUSED) or {"name": ""})["name"] != name:
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")


def test_pages_are_walked_by_tab_and_dialogs_keep_the_focus_and_give_it_back(
    chromium: Browser, site: Site, fleet: Fleet
) -> None:
    agent = Agent("plain", model="openai:gpt-4o-mini")
    batch = fleet.submit_batch([{"id": "one", "input": "x"}], agent=agent)
    run_id = fleet.runs.find("one", batch.id)
    visitor = Visitor(chromium, site, reduced_motion="reduce")  # scrolls at once
    page = visitor.page
    wanted = {
        "/runs": {"Status", "Filter", "Select all runs of this page", f"Run {run_id}"},
        "/batches": {"Submit a batch", "the objects given"},
        "/approvals": {"Calls that wait for a person"},
        "/costs": {"By", "From day (UTC)", "Show", "Export CSV"},
        f"/runs/{run_id}": {"Cancel", "Pause"},
        f"/batches/{batch.id}": {"Pause …", "Cancel …"},
        "/fleet": {"Set a limit", "Pause the fleet"},
    }
    for path, names in wanted.items():
        visitor.open(path)
        place = "button" if path.count("/") > 1 else ".table-responsive"
        expect(page.locator(f"#content {place}:visible").first).to_be_visible()
        if path == "/fleet":  # whose parts come one by one, and move those below
            expect(page.locator("#content")).to_contain_text("checks have passed")
            expect(page.get_by_role("region", name="Actions")).to_contain_text("submit batch")
        found = walk(page)
        assert found[0]["name"] == "Skip to main content", path
        assert names <= {one["name"] for one in found}, path
        assert [one for one in found if not (one["isMarked"] and one["isInView"])] == [], path

    press(page, "Pause the fleet")
    expect(page.locator("dialog[open]")).to_be_visible()
    focused = []
    for _ in range(6):
        page.keyboard.press("Tab")
        focused.append(page.evaluate(FOCUSED))
    assert {one["isInDialog"] for one in focused if one is not None} == {True}, focused
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)
    assert page.evaluate(FOCUSED)["name"] == "Pause the fleet"
    page.keyboard.press("Enter")
    press(page, "Pause")
    expect(page.get_by_role("button", name="Resume the fleet")).to_be_visible()
    assert fleet.overview().paused
    assert visitor.complaints == []
