"""The results of a batch as a file: made in a thread of its own, sent as fast as it is taken."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryFile
from typing import ClassVar

from tornado import web
from tornado.iostream import StreamClosedError

from stepfleet.orchestrator.batches.files.openai_format import to_openai_line
from stepfleet.orchestrator.batches.files.result_lines import as_line, full
from stepfleet.orchestrator.client.batch import AsyncBatch
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.dashboard.api.handling import ApiHandler, MissingError, Parameter, flag
from stepfleet.orchestrator.errors import AgentException, ConfigurationError

log = logging.getLogger(__name__)

AT_ONCE = 65_536
"""Bytes of a file that are sent together."""
SEND_SECONDS = 60.0
"""After so long without taking a part, a client is given up."""
KINDS = {"jsonl": "application/x-ndjson", "csv": "text/csv; charset=UTF-8"}

Send = Callable[[bytes], None]


def _kind(text: str) -> str:
    if text not in KINDS:
        raise ValueError
    return text


class ResultsOf(ApiHandler):
    """The results of a batch's ended runs as a file: JSONL, or CSV."""

    parameters: ClassVar = {
        "format": Parameter("jsonl or csv", _kind),
        "failed": flag("only runs that did not complete"),
    }

    async def get(self, batch_id: str) -> None:
        """Send the file, where texts of models are shown."""
        if not self.shows_content:
            raise web.HTTPError(403, "results are not shown here (see docs/flower.md)")
        try:
            query = self.query()
            batch = await self._batch(batch_id)
        except ConfigurationError as error:
            return self.refuse(error, 404 if isinstance(error, MissingError) else 400)
        except AgentException as error:
            return self.refuse(error, 503)
        kind = query.get("format", "jsonl")
        self.set_header("Content-Type", KINDS[kind])
        name = f"batch-{batch.id}.{kind}"
        self.set_header("Content-Disposition", f'attachment; filename="{name}"')
        return await self._send_all(batch.id, kind, failed=query.get("failed", False))

    async def _batch(self, batch_id: str) -> AsyncBatch:
        try:
            return await self.site.fleet.batches.get(batch_id)
        except ConfigurationError as error:
            raise MissingError(error.message) from None

    async def _send_all(self, batch_id: str, kind: str, *, failed: bool) -> None:
        loop = asyncio.get_running_loop()

        def send(part: bytes) -> None:
            asyncio.run_coroutine_threadsafe(self._send(part), loop).result()

        write = write_csv if kind == "csv" else write_lines
        try:
            with self.site.work.place():
                await self.site.work.do(
                    self.site.fleet, partial(write, batch_id, failed=failed, send=send)
                )
        except (StreamClosedError, TimeoutError):
            self.break_off()
        except AgentException as error:
            if self._headers_written:
                log.warning("the results of batch %s end early: %s", batch_id, error)
                return self.break_off()
            self.clear_header("Content-Disposition")
            return self.refuse(error, 503)
        else:
            await self.finish()

    async def _send(self, part: bytes) -> None:
        self.write(part)
        async with asyncio.timeout(SEND_SECONDS):
            await self.flush()


async def write_lines(batch_id: str, fleet: AsyncFleet, *, failed: bool, send: Send) -> None:
    """Send a line for each result, in the order of the batch's lines."""
    batch = await fleet.batches.get(batch_id)
    is_openai = (await batch.progress()).format == "openai"
    line_of = to_openai_line if is_openai else full
    part = bytearray()
    async for result in batch.results(ordered=True, follow=False, failed=failed):
        part += as_line(line_of(result))
        if len(part) >= AT_ONCE:
            send(bytes(part))
            part.clear()
    send(bytes(part))


async def write_csv(batch_id: str, fleet: AsyncFleet, *, failed: bool, send: Send) -> None:
    """Send a table; its columns are known when all rows are on disk."""
    batch = await fleet.batches.get(batch_id)
    with await batch.table(follow=False, failed=failed) as table, TemporaryFile() as file:
        table.write_csv(file)
        file.seek(0)
        while part := file.read(AT_ONCE):
            send(part)
