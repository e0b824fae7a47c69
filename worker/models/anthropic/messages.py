"""The format of `POST /v1/messages`."""

from functools import partial

from stepfleet.orchestrator.models.endpoint import Endpoint
from stepfleet.orchestrator.models.failures import stated_failure
from stepfleet.orchestrator.models.routes import ROUTES
from stepfleet.orchestrator.models.services import Api
from stepfleet.orchestrator.records.responses import ModelRequest
from stepfleet.worker.models.anthropic.answer import StreamedMessage, parse_message, usage_of
from stepfleet.worker.models.anthropic.request import request_body
from stepfleet.worker.models.bodies import encode, parse_body
from stepfleet.worker.models.http_model import Format


def _body(request: ModelRequest, _: Endpoint) -> bytes:
    return encode(request_body(request))


MESSAGES = Format(
    route=ROUTES[Api.MESSAGES],
    body=_body,
    parse=parse_body,
    stream=StreamedMessage,
    usage=usage_of,
    response=parse_message,
    failure=partial(stated_failure, answer="content"),
)
