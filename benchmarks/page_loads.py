"""How long a page takes in Chromium from the start of its navigation until its rows are painted.

Knows pages of Flower by the table or the region that they fill; the times are the browser's own.
"""

import base64
import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BINARIES = ("chromium", "google-chrome", "chrome")
NOTE = """
window.shown = new Promise((resolve) => {
  new MutationObserver((_, watch) => {
    if (!document.querySelector("#content tbody tr, #content dl.sf-facts")) return;
    watch.disconnect();
    // At the second frame the first one is on the screen.
    requestAnimationFrame(() => requestAnimationFrame(() => resolve(performance.now())));
  }).observe(document, { childList: true, subtree: true });
});
"""
READ = """async () => {
  const ms = await window.shown;
  const before = performance.getEntriesByType("resource").filter((one) => one.responseEnd <= ms);
  const isApi = (one) => one.name.includes("/api/stepfleet/");
  const files = before.filter((one) => !isApi(one)).map((one) => one.responseEnd);
  const reads = before.filter(isApi).map((one) => one.responseEnd - one.startTime);
  const document_ms = performance.getEntriesByType("navigation")[0].responseEnd;
  const files_ms = Math.max(0, Math.max(...files) - document_ms);
  return { ms, document_ms, files_ms, api_ms: Math.max(0, ...reads) };
}"""


@contextmanager
def chromium() -> Iterator["Browser"]:
    """Start a browser without a window."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - only here is it needed

    binary = next((found for name in BINARIES if (found := shutil.which(name))), None)
    with sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        try:
            yield made
        finally:
            made.close()


def opened(browser: "Browser", auth: str, address: str, tries: int) -> dict[str, dict[str, Any]]:
    """Return the median times in ms of a page that is opened first, and of one opened again.

    `document_ms` is until the skeleton is there, `files_ms` what scripts and styles take after it,
    `api_ms` the longest request of data before the rows.
    """
    # By a header: credentials of a context would switch its cache off.
    headers = {"Authorization": f"Basic {base64.b64encode(auth.encode()).decode()}"}
    found: dict[str, list[dict[str, float]]] = {"first": [], "again": []}
    for _ in range(tries):
        context = browser.new_context(extra_http_headers=headers)
        context.add_init_script(NOTE)
        page = context.new_page()
        for times in found.values():
            page.goto(address)
            times.append(page.evaluate(READ))
        context.close()
    return {state: _medians(times) for state, times in found.items()}


def _medians(times: list[dict[str, float]]) -> dict[str, float]:
    medians = {name: statistics.median(one[name] for one in times) for name in times[0]}
    return {**medians, "longest_ms": max(one["ms"] for one in times)}
