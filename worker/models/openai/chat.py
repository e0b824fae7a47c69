"""OpenAI's chat completions, and every service that is compatible with them."""

from dataclasses import replace
from functools import partial

from stepfleet.orchestrator.models.endpoint import Endpoint
from stepfleet.orchestrator.models.routes import ROUTES
from stepfleet.orchestrator.models.services import Api
from stepfleet.orchestrator.records.responses import ModelRequest
from stepfleet.worker.models.bodies import encode, parse_body
from stepfleet.worker.models.http_model import Format
from stepfleet.worker.models.openai.answer import parse_completion, usage_of
from stepfleet.worker.models.openai.request import request_body
from stepfleet.worker.models.openai.stream import StreamedCompletion, failure_in


def _body(request: ModelRequest, endpoint: Endpoint) -> bytes:
    return encode(request_body(request, official=endpoint.official))


CHAT_COMPLETIONS = Format(
    route=ROUTES[Api.CHAT],
    body=_body,
    parse=parse_body,
    stream=StreamedCompletion,
    usage=usage_of,
    response=parse_completion,
    failure=failure_in,
)


def with_reasoning_sent_back(form: Format, field: str) -> Format:
    """Return a format whose service wants the `field` of its answers' reasoning again."""

    def body(request: ModelRequest, endpoint: Endpoint) -> bytes:
        return encode(request_body(request, official=endpoint.official, reasoning=field))

    return replace(form, body=body, response=partial(parse_completion, reasoning=field))


AZURE_CHAT_COMPLETIONS = replace(CHAT_COMPLETIONS, route=ROUTES[Api.AZURE])
