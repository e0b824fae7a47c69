"""Where the requests of each protocol go, and the smallest request of each. Pure.

What a real request and its answer look like is the workers' matter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from stepfleet.orchestrator.models.endpoint import Endpoint
from stepfleet.orchestrator.models.services import Api

_PING = "ping"
_FEWEST_RESPONSES_TOKENS = 16  # the service refuses fewer
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Route:
    """How a protocol is addressed.

    Requests go to `path` of the service, with `headers`; `url` adds what depends on the model and
    on whether the answer is streamed. `smallest` makes the body of a call with the shortest answer.
    """

    path: str
    smallest: Callable[[Endpoint, str], Fields]
    url: Callable[[Endpoint, str, bool], str] = lambda endpoint, _, __: endpoint.url
    headers: Mapping[str, str] = field(default_factory=dict)


def _chat(endpoint: Endpoint, model: str) -> Fields:
    limit = "max_completion_tokens" if endpoint.official else "max_tokens"
    return {"model": model, "messages": [{"role": "user", "content": _PING}], limit: 1}


def _responses(_: Endpoint, model: str) -> Fields:
    limit = _FEWEST_RESPONSES_TOKENS
    return {"model": model, "input": _PING, "max_output_tokens": limit, "store": False}


def _messages(_: Endpoint, model: str) -> Fields:
    return {"model": model, "messages": [{"role": "user", "content": _PING}], "max_tokens": 1}


def _content(_: Endpoint, __: str) -> Fields:
    turn = {"role": "user", "parts": [{"text": _PING}]}
    return {"contents": [turn], "generationConfig": {"maxOutputTokens": 1}}


def _converse(_: Endpoint, __: str) -> Fields:
    turn = {"role": "user", "content": [{"text": _PING}]}
    return {"messages": [turn], "inferenceConfig": {"maxTokens": 1}}


def _azure_url(endpoint: Endpoint, model: str, _: bool) -> str:
    """Return the address of a deployment; with a version it is that of the older interface."""
    if not endpoint.version:
        return f"{endpoint.url}/openai/v1/chat/completions"
    deployment, version = quote(model, safe=""), quote(endpoint.version, safe="")
    path = f"/openai/deployments/{deployment}/chat/completions"
    return f"{endpoint.url}{path}?api-version={version}"


def _google_url(endpoint: Endpoint, model: str, streams: bool) -> str:
    verb = "streamGenerateContent?alt=sse" if streams else "generateContent"
    version = {"": "v1", "beta": "v1beta"}.get(endpoint.version, endpoint.version)
    return f"{endpoint.url}/{quote(version, safe='')}/models/{quote(model, safe='')}:{verb}"


def _bedrock_url(endpoint: Endpoint, model: str, streams: bool) -> str:
    verb = "converse-stream" if streams else "converse"
    return f"{endpoint.url}/{quote(model, safe='-._~')}/{verb}"


ROUTES: Mapping[Api, Route] = {
    Api.CHAT: Route("/chat/completions", _chat),
    Api.AZURE: Route("", _chat, _azure_url),
    Api.RESPONSES: Route("/responses", _responses),
    Api.MESSAGES: Route("/v1/messages", _messages, headers={"anthropic-version": "2026-10-21"}),
    Api.GENERATE_CONTENT: Route("", _content, _google_url),
    Api.CONVERSE: Route("/model", _converse, _bedrock_url, {"accept": "*/*"}),
}
