"""A batch from a file that is the body of a request: checked line by line, or submitted.

The body goes to a temporary file as it comes; it is never whole in memory.
"""

import time
from contextlib import ExitStack
from tempfile import TemporaryFile
from typing import Any, ClassVar

from tornado.ioloop import IOLoop

from stepfleet.orchestrator.batches.check import BatchCheck
from stepfleet.orchestrator.batches.files.source import BatchInput, format_by_name
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.dashboard.api.actions import Audited
from stepfleet.orchestrator.dashboard.api.entries import of_file
from stepfleet.orchestrator.dashboard.api.handling import Parameter, Site, flag, text
from stepfleet.orchestrator.dashboard.api.records import SubmissionResult
from stepfleet.orchestrator.errors import AgentException, ConfigurationError

LARGEST = 128 * 1024 * 1024
"""Bytes of a file that is taken; larger ones are for `stepfleet submit`."""
DRAINED = 4 * LARGEST
"""Bytes of a file that is too large which are read nevertheless: its sender gets the answer."""
MOST_LINES = 3_000_000
"""Lines of a file that is taken: each bad one needs memory, and all of them a processor."""
BODY_SECONDS = 1_800.0
GRACE_SECONDS, LEAST_RATE = 30.0, 65_536
"""Seconds that a file may take to arrive, and bytes for each further one: places are few."""
FORMATS = ("jsonl", "json", "csv", "tsv")
_TOO_LARGE = (
    f"body: the file has more than {LARGEST >> 20} MiB; split it, or use "
    "stepfleet submit FILE --agent NAME, which takes files of any size"
)
_TOO_SLOW = (
    f"body: the file comes with less than {LEAST_RATE >> 10} KiB per second; send it from nearer "
    "by, or use stepfleet submit FILE --agent NAME"
)


class SubmittedFile(Audited):
    """A file of inputs, JSONL, CSV, TSV or a JSON array: checked, or submitted as a batch."""

    parameters: ClassVar = {
        "name": text("the file's name; its ending names the format", 1_000),
        "format": Parameter(f"{', '.join(FORMATS)}; without it by the name's ending"),
        "agent": text("the agent of lines that name none", 200),
        "id": text("an id for the batch: the same one is the same batch", 200),
        "priority": Parameter("high, normal or low"),
        "tenant": Parameter("the tenant of lines that name none"),
        "input_field": text("the field or column that is sent, where rows are your own", 200),
        "id_field": text("the field or column that is a row's id", 200),
        "skip_invalid": flag("submit the good lines although others are bad"),
    }

    def initialize(self, site: Site) -> None:
        """Store the site."""
        super().initialize(site)
        self._held = ExitStack()
        self._size = 0
        self._problem: tuple[str, int] | None = None

    def prepare(self) -> None:
        """Take a place and make the file, unless the request is refused."""
        super().prepare()
        connection: Any = self.request.connection
        connection.set_max_body_size(DRAINED)
        connection.set_body_timeout(BODY_SECONDS)
        try:
            self._given = _given(self.query())
            size = self.request.headers.get("Content-Length", "")
            if size.isdecimal() and int(size[:20]) > LARGEST:
                return self.refuse(ConfigurationError(_TOO_LARGE), 413)
            self._held.enter_context(self.site.work.place())
            self._file = TemporaryFile()  # noqa: SIM115 - closed with what is held
            self._held.enter_context(self._file)
            self._expect_more(IOLoop.current(), time.monotonic() + GRACE_SECONDS)
        except ConfigurationError as error:
            self.refuse(error, 400)
        except (AgentException, OSError) as error:
            self.refuse(error, 503)

    def _expect_more(self, loop: IOLoop, until: float) -> None:
        """Give the place to others where the file comes too slowly."""
        whole: Any = self.request._body_future  # noqa: SLF001 - where Tornado notes that it is whole
        left = until + self._size / LEAST_RATE - time.monotonic()
        if whole.done() or self._finished:
            return
        if left > 0:
            timer = loop.call_later(max(left, 1), self._expect_more, loop, until)
            self._held.callback(loop.remove_timeout, timer)
        else:
            self.refuse(ConfigurationError(_TOO_SLOW), 408)

    def data_received(self, chunk: bytes) -> None:
        """Write a part of the body to the file."""
        self._size += len(chunk)
        if self._problem is not None:
            return
        if self._size > LARGEST:
            self._problem = (_TOO_LARGE, 413)
            return
        try:
            self._file.write(chunk)
        except OSError as error:
            self._problem = (f"body: Flower cannot keep the file: {error.strerror}", 507)

    def on_connection_close(self) -> None:
        """Let go of a file that does not come to its end; a complete file is worked on."""
        whole: Any = self.request._body_future  # noqa: SLF001 - where Tornado notes that it is whole
        is_lost = not whole.done()
        super().on_connection_close()
        if is_lost:
            self._held.close()

    def on_finish(self) -> None:
        """Remove the file."""
        self._held.close()

    async def post(self, verb: str) -> None:
        """Answer with what was found, or with the batch."""
        with self._held:  # also where the client has gone meanwhile
            if self._problem is not None:
                self.refuse(ConfigurationError(self._problem[0]), self._problem[1])
            elif verb == "check":
                await self.attempt(self._check)
            else:
                about = f"batch {self._given['id'] or self._given['name']}"
                detail = of_file(self._given)
                await self.attempt(lambda: self.audited(verb, about, detail, self._submit))

    async def _check(self) -> BatchCheck:
        """Look at all lines."""
        given, source = self._given, self._source()
        about = {"idempotency_key": given["id"], **given["options"]}
        return await self.site.work.do(
            self.site.fleet, lambda fleet: fleet.batches.check(source, given["agent"], **about)
        )

    async def _submit(self) -> SubmissionResult:
        """Make the batch, or find it."""
        given, source = self._given, self._source()

        async def submit(fleet: AsyncFleet) -> SubmissionResult:
            batch = await fleet.submit_batch(
                source,
                given["agent"],
                idempotency_key=given["id"],
                skip_invalid=given["skip_invalid"],
                name=given["name"],
                **given["options"],
            )
            progress = await batch.progress()
            return SubmissionResult(
                batch_id=batch.id,
                is_new=batch.is_new,
                runs=progress.total,
                skipped=batch.skipped_count,
                cancelled=progress.cancel_requested,
            )

        return await self.site.work.do(self.site.fleet, submit)

    def _source(self) -> BatchInput:
        self._file.flush()
        about = self._given["name"], self._given["format"]
        return BatchInput(self._file, *about, most=MOST_LINES)


def _given(query: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a query. Raises `ConfigurationError` that names one."""
    name = query.get("name", "").replace("\\", "/").rpartition("/")[2][-200:] or "upload"
    kind = query.get("format") or format_by_name(name)
    if kind not in FORMATS:
        msg = f"format: {ascii(kind)[:60]} is not read here; upload JSONL, CSV, TSV or a JSON array"
        raise ConfigurationError(msg)
    options = {one: query.get(one) or None for one in ("input_field", "id_field", "tenant")}
    return {
        "name": name,
        "format": kind,
        "agent": query.get("agent"),
        "id": query.get("id"),
        "skip_invalid": query.get("skip_invalid", False),
        "options": {**options, "priority": query.get("priority")},
    }
