"""A person's browser on our pages in Flower: Debian's Chromium, without a window."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from support.servers.flower_site import AUTH, Site

LONG = 60_000.0
"""Milliseconds for whatever a page shows, also on a busy machine."""
expect.set_options(timeout=LONG)
BINARIES = ("chromium", "google-chrome", "chrome")


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser."""
    binary = next((found for name in BINARIES if (found := shutil.which(name))), None)
    assert binary, "the tests need chromium on PATH (apt-get install chromium)"
    with sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        try:
            yield made
        finally:
            made.close()


class Visitor:
    """Somebody with a browser of their own. What a page complains of fails the test."""

    def __init__(self, made: Browser, site: Site, auth: str = AUTH, **about: Any) -> None:
        name, _, password = auth.partition(":")
        self.site = site
        self.context: BrowserContext = made.new_context(
            http_credentials={"username": name, "password": password},
            **{"viewport": {"width": 1280, "height": 900}, **about},
        )
        self.context.set_default_timeout(LONG)
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._note)

    def _note(self, message: Any) -> None:
        if message.type == "error":
            self.complaints.append(message.text)

    def open(self, path: str) -> Page:
        """Go to a page, and wait until it shows its data."""
        self.page.goto(f"http://127.0.0.1:{self.site.port}{path}")
        expect(self.page.locator("#content")).not_to_contain_text("Loading …")
        return self.page

    def barriers(self) -> list[str]:
        """Return what axe finds that is serious or critical on the page."""
        found = Axe().run(self.page).response["violations"]
        return [
            f"{one['id']}: {one['nodes'][0]['html'][:200]}"
            for one in found
            if one["impact"] in {"serious", "critical"}
        ]

    def is_too_wide(self) -> bool:
        """Whether the page scrolls sideways."""
        wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        return bool(self.page.evaluate(wide))
