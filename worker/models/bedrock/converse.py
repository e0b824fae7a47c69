"""The format of `POST /model/MODEL/converse`, and of its stream."""

from functools import partial

from stepfleet.orchestrator.models.endpoint import Endpoint
from stepfleet.orchestrator.models.failures import stated_failure
from stepfleet.orchestrator.models.routes import ROUTES
from stepfleet.orchestrator.models.services import Api
from stepfleet.orchestrator.records.responses import ModelRequest
from stepfleet.worker.models.bedrock.answer import StreamedConverse, parse_converse, usage_of
from stepfleet.worker.models.bedrock.frames import FrameCutter
from stepfleet.worker.models.bedrock.request import request_body
from stepfleet.worker.models.bodies import encode, parse_body
from stepfleet.worker.models.http_model import Format


def _body(request: ModelRequest, _: Endpoint) -> bytes:
    return encode(request_body(request))


CONVERSE = Format(
    route=ROUTES[Api.CONVERSE],
    body=_body,
    parse=parse_body,
    stream=StreamedConverse,
    usage=usage_of,
    response=parse_converse,
    failure=partial(stated_failure, answer="output"),
    stream_type="application/vnd.amazon.eventstream",
    cutter=FrameCutter,
)
