"""The format of `POST /responses`."""

from functools import partial

from stepfleet.orchestrator.models.endpoint import Endpoint
from stepfleet.orchestrator.models.failures import stated_failure
from stepfleet.orchestrator.models.routes import ROUTES
from stepfleet.orchestrator.models.services import Api
from stepfleet.orchestrator.records.responses import ModelRequest
from stepfleet.worker.models.bodies import encode, parse_body
from stepfleet.worker.models.http_model import Format
from stepfleet.worker.models.responses.answer import StreamedResponse, parse_response, usage_of
from stepfleet.worker.models.responses.request import request_body


def _body(request: ModelRequest, _: Endpoint) -> bytes:
    return encode(request_body(request))


RESPONSES = Format(
    route=ROUTES[Api.RESPONSES],
    body=_body,
    parse=parse_body,
    stream=StreamedResponse,
    usage=usage_of,
    response=parse_response,
    failure=partial(stated_failure, answer="output"),
)
