"""The format of `POST /v1/models/MODEL:generateContent`, and of its stream."""

from functools import partial
from typing import Any

from stepfleet.orchestrator.models.endpoint import Endpoint
from stepfleet.orchestrator.models.failures import stated_failure
from stepfleet.orchestrator.models.routes import ROUTES
from stepfleet.orchestrator.models.services import Api
from stepfleet.orchestrator.records.responses import ModelRequest
from stepfleet.worker.models.bodies import encode, malformed, parse_body
from stepfleet.worker.models.google.answer import StreamedContent, parse_content, usage_of
from stepfleet.worker.models.google.request import request_body
from stepfleet.worker.models.http_model import Format


def _body(request: ModelRequest, _: Endpoint) -> bytes:
    return encode(request_body(request))


def _parse(body: bytes) -> dict[str, Any]:
    """Return the answer; proxies that drop `alt=sse` give a list of a stream's events."""
    if body.lstrip()[:1] != b"[":
        return parse_body(body)
    stream = StreamedContent()
    for event in parse_body(b'{"events":%s}' % body)["events"]:
        if not isinstance(event, dict):
            raise malformed("an event of its list is not a JSON object")
        stream.take(event, 0)
    return stream.error or stream.payload()


GENERATE_CONTENT = Format(
    route=ROUTES[Api.GENERATE_CONTENT],
    body=_body,
    parse=_parse,
    stream=StreamedContent,
    usage=usage_of,
    usage_field="usageMetadata",
    response=parse_content,
    failure=partial(stated_failure, answer="candidates"),
)
