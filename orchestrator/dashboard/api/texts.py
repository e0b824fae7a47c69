"""A text of a step in full, as a file: a page shows its beginning only."""

import asyncio
from typing import ClassVar

from tornado import web
from tornado.iostream import StreamClosedError

from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.dashboard.api.handling import ApiHandler, Parameter, whole
from stepfleet.orchestrator.errors import ConfigurationError, StoreError

KIND = "text/plain; charset=UTF-8"
SEND_SECONDS = 60.0
"""For which a client may take the text, until it is given up."""


class TextOf(ApiHandler):
    """A text of a step in full, as a file."""

    parameters: ClassVar = {
        "step": whole("the step", 1, 1_000_000),
        "part": Parameter("which text, as `cut` of the step names it"),
    }

    async def get(self, run_id: str) -> None:
        """Send the file, where texts of models are shown."""
        if not self.shows_content:
            raise web.HTTPError(403, "texts are not shown here (see docs/flower.md)")
        try:
            query = self.query()
        except ConfigurationError as error:
            return self.refuse(error, 400)
        if query.keys() != self.parameters.keys():
            return self.refuse(ConfigurationError("step and part: write both"), 400)
        try:
            with self.site.work.place():
                await self._send(run_id, **query)
        except ConfigurationError as error:
            return self.refuse(error, 404)
        except StoreError as error:
            return self.refuse(error, 503)
        return None

    async def _send(self, run_id: str, step: int, part: str) -> None:
        store = await store_of(self.site.fleet)
        text = await store.timelines.text(run_id, step, part)
        # Only names of texts that there are come so far.
        name = f"run-{run_id}-step-{step}-{part.replace(':', '-')}.txt"
        self.set_header("Content-Type", KIND)
        self.set_header("Content-Disposition", f'attachment; filename="{name}"')
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self.finish(text.encode(errors="replace"))
        except (StreamClosedError, TimeoutError):
            self.break_off()
