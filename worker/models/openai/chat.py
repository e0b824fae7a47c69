"""OpenAI's chat completions, and every service that is compatible with them."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.records.responses import ModelRequest
from stepfleet.worker.models.connections import Connections
from stepfleet.worker.models.endpoint import Endpoint, endpoint_of
from stepfleet.worker.models.http_model import RESPONSE_LIMIT, Format, HttpModel
from stepfleet.worker.models.openai.answer import parse_body, parse_completion, usage_of
from stepfleet.worker.models.openai.errors import failed_event, refusal
from stepfleet.worker.models.openai.request import encode, request_body
from stepfleet.worker.models.openai.stream import StreamedCompletion


def _body(request: ModelRequest, endpoint: Endpoint) -> bytes:
    return encode(request_body(request, official=endpoint.official))


def _failure(payload: dict[str, Any], endpoint: Endpoint) -> ModelError | None:
    if not payload.get("error") or payload.get("choices"):
        return None
    return failed_event(payload, host=endpoint.host, key=endpoint.key)


def _refusal(
    status: int, headers: Mapping[str, str], body: bytes, endpoint: Endpoint, now: datetime
) -> ModelError:
    return refusal(status, headers, body, host=endpoint.host, key=endpoint.key, now=now)


CHAT_COMPLETIONS = Format(
    endpoint=endpoint_of,
    body=_body,
    parse=parse_body,
    stream=StreamedCompletion,
    usage=usage_of,
    response=parse_completion,
    failure=_failure,
    refusal=_refusal,
)


class OpenAI(HttpModel):
    """Models behind `POST {base_url}/chat/completions`.

    The address, key and organization come from the request's settings, then from `environment`:
    OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_ORG_ID.
    """

    def __init__(
        self,
        connections: Connections,
        *,
        environment: Mapping[str, str] | None = None,
        response_limit: int = RESPONSE_LIMIT,
    ) -> None:
        super().__init__(
            CHAT_COMPLETIONS, connections, environment=environment, response_limit=response_limit
        )
