"""The format of `POST /v1/models/MODEL:generateContent`, and of its stream."""

from functools import partial

from stepfleet.orchestrator.models.endpoint import Endpoint
from stepfleet.orchestrator.models.failures import stated_failure
from stepfleet.orchestrator.models.routes import ROUTES
from stepfleet.orchestrator.models.services import Api
from stepfleet.orchestrator.records.responses import ModelRequest
from stepfleet.worker.models.bodies import encode, parse_body
from stepfleet.worker.models.google.answer import StreamedContent, parse_content, usage_of
from stepfleet.worker.models.google.request import request_body
from stepfleet.worker.models.http_model import Format


def _body(request: ModelRequest, _: Endpoint) -> bytes:
    return encode(request_body(request))


GENERATE_CONTENT = Format(
    route=ROUTES[Api.GENERATE_CONTENT],
    body=_body,
    parse=parse_body,
    stream=StreamedContent,
    usage=usage_of,
    usage_field="usageMetadata",
    response=parse_content,
    failure=partial(stated_failure, answer="candidates"),
)
