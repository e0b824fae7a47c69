"""Takes the pictures of docs/flower.md: `python tests/support/documents/flower_pictures.py`.

A batch of 5,000 runs, of which 20 fail, on a Redis, a worker, a model server and a Flower of its
own; the browser finds them by their error, and retries them.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from playwright.sync_api import Page, expect
from support.browser import Visitor, browser
from support.servers.flower_site import started_flower
from support.servers.redis_servers import RedisServer, short_folder
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Agent, Fleet
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, Reply
from stepfleet.worker.testing.server import ModelServer

PICTURES = Path(__file__).parents[3] / "docs" / "pictures"
RUNS, BAD, WIDTH, HEIGHT = 5_000, 20, 1_200, 620
LONG = 600.0


class Script:
    """Refuses twenty questions for what they say, until somebody has mended it."""

    mended = False

    def __call__(self, request: RequestRecord) -> Reply | Fault:
        """Answer a question."""
        number = int(request.question.rpartition(" ")[2])
        is_bad = number % (RUNS // BAD) == 7 and not self.mended
        return Fault("content_filter") if is_bad else Reply("It is a kitchen appliance.")


def take(page: Page, name: str) -> None:
    """Write a picture of the page as it is."""
    page.screenshot(path=PICTURES / f"{name}.png", animations="disabled")


def main() -> None:
    """Take all pictures."""
    script = Script()
    agent = Agent("classifier", model="openai:gpt-4o-mini", instructions="Classify the product.")
    lines = [{"id": f"sku-{n:04}", "input": f"Classify product {n}"} for n in range(RUNS)]
    os.environ["STEPFLEET_HOLD_AFTER"] = "0"
    with short_folder() as folder, ModelServer(script) as model, browser() as chromium:
        server = RedisServer(folder, appendonly="yes").start()
        commands = CommandLine(folder)
        agents = folder / "catalog_agents.py"
        agents.write_text(
            "from stepfleet.orchestrator import Agent\n"
            f"agent = Agent({agent.name!r}, model='openai:gpt-4o-mini')\n"
        )
        own = {"STEPFLEET_SLOTS": "500", "STEPFLEET_AGENTS": str(agents)}
        worker = FleetWorker(folder, server.url, model.url, env=own)
        try:
            worker.start()
            with Fleet(server.url) as fleet:
                batch = fleet.submit_batch(lines, agent=agent, tenant="shop", name="Spring catalog")
                batch.wait(LONG)
                site = started_flower(commands, server.url)
                visitor = Visitor(chromium, site, viewport={"width": WIDTH, "height": HEIGHT})
                tell(visitor, batch.id, script)
        finally:
            worker.end()
            commands.end()
            server.stop()


def tell(visitor: Visitor, batch: str, script: Script) -> None:
    """Go through the story."""
    page = visitor.open(f"/batches/{batch}")
    expect(page.get_by_role("button", name="Retry these")).to_be_visible()
    take(page, "failed-1-batch")
    page.get_by_role("link", name="runs with this cause").click()
    expect(page.locator("table tbody tr")).to_have_count(BAD)
    take(page, "failed-2-runs")
    page.locator("table tbody a.sf-id").first.click()
    expect(page.locator("#content")).to_contain_text("Criterion")
    take(page, "failed-3-run")
    script.mended = True
    page.goto(f"http://127.0.0.1:{visitor.site.port}/batches/{batch}")
    page.get_by_role("button", name="Retry these").click()
    take(page, "failed-4-retry")
    page.locator("dialog[open] button[type=submit]").click()
    expect(page.locator("#content")).to_contain_text(f"completed: {RUNS:,}")
    take(page, "failed-5-completed")


if __name__ == "__main__":
    main()
