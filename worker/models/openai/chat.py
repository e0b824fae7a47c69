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
from stepfleet.worker.models.openai.request import Dialect, request_body
from stepfleet.worker.models.openai.stream import StreamedCompletion, failure_in

_GOOGLE = ".googleapis.com"


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


def chat_of(form: Format, name: str, reasoning: str) -> Format:
    """Return the format of the service `name`: it gets back what it has given with its answers.

    `reasoning` is the field of their reasoning that it wants; "" for none.
    """

    def body(request: ModelRequest, endpoint: Endpoint) -> bytes:
        is_gemini = endpoint.host.endswith(_GOOGLE) and "gemini" in request.model
        to = Dialect(name, reasoning, endpoint.service, is_gemini)
        return encode(request_body(request, official=endpoint.official, to=to))

    response = partial(parse_completion, reasoning=reasoning, service=name)
    stream = partial(StreamedCompletion, service=name)
    return replace(form, body=body, stream=stream, response=response)


AZURE_CHAT_COMPLETIONS = replace(CHAT_COMPLETIONS, route=ROUTES[Api.AZURE])
