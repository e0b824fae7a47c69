"""OpenAI's chat completions, and every service that is compatible with them."""

from dataclasses import replace
from typing import Any
from urllib.parse import quote

from stepfleet.orchestrator.models.endpoint import Endpoint
from stepfleet.orchestrator.records.responses import ModelRequest
from stepfleet.worker.models.bodies import encode, parse_body
from stepfleet.worker.models.http_model import Format
from stepfleet.worker.models.openai.answer import parse_completion, usage_of
from stepfleet.worker.models.openai.request import request_body
from stepfleet.worker.models.openai.stream import StreamedCompletion


def _body(request: ModelRequest, endpoint: Endpoint) -> bytes:
    return encode(request_body(request, official=endpoint.official))


def _failed(payload: dict[str, Any]) -> bool:
    return bool(payload.get("error")) and not payload.get("choices")


CHAT_COMPLETIONS = Format(
    path="/chat/completions",
    body=_body,
    parse=parse_body,
    stream=StreamedCompletion,
    usage=usage_of,
    response=parse_completion,
    failed=_failed,
)


def _azure_url(endpoint: Endpoint, request: ModelRequest) -> str:
    """Return the address of a deployment; with a version it is that of the older interface."""
    if not endpoint.version:
        return f"{endpoint.url}/openai/v1/chat/completions"
    deployment, version = quote(request.model, safe=""), quote(endpoint.version, safe="")
    path = f"/openai/deployments/{deployment}/chat/completions"
    return f"{endpoint.url}{path}?api-version={version}"


AZURE_CHAT_COMPLETIONS = replace(CHAT_COMPLETIONS, path="", url=_azure_url)
