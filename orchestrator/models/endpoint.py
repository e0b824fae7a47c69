"""Decides the address and the key of a call, from settings and environment. Pure.

A key is sent only where it belongs: a provider's default key goes to that provider, to the address
that the worker's own environment names, and to this machine. An agent that names another address
names the variable of its key as well.
"""

import functools
import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.models.services import SERVICES, Api, Service, service_at
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.records.responses import ModelSettings
from stepfleet.orchestrator.records.text.redaction import name_secret

_AZURE_HOSTS = re.compile(r"[^.]+\.openai\.azure\.com")
_SWITCH = "STEPFLEET_ALLOW_MODEL_REQUESTS"
_OFF = {"0", "false", "no", "off"}
_JSON: Mapping[str, str] = {"content-type": "application/json"}


class ModelSetupError(ModelError):
    """A model cannot be called as the agent or the worker is set up; retrying does not help."""

    code = ModelErrorCode.SETUP.value


@dataclass(frozen=True)
class Endpoint:
    """The address of one service with the headers that open it."""

    url: str
    host: str
    official: bool
    headers: Mapping[str, str] = field(repr=False)
    key: str | None = field(default=None, repr=False)
    variable: str = ""
    """The variable that has the key, or should have it."""
    version: str = ""
    """The version of the interface that the environment names."""
    region: str = ""
    """The region for which each call is signed with AWS's credentials; "" where none is."""
    tokens: str = ""
    """The function that returns a bearer token, where calls need one of it."""
    service: Service = SERVICES["compatible"]
    """The service that is there."""


def endpoint_of(
    settings: ModelSettings,
    environment: Mapping[str, str],
    service: Service = SERVICES["openai"],
    *,
    path: str = "/chat/completions",
    headers: Mapping[str, str] = _JSON,
) -> Endpoint:
    """Return where `service` answers `path`; `headers` are those of every call to it.

    Raises `ModelSetupError` for an unusable address, a missing key, or when
    STEPFLEET_ALLOW_MODEL_REQUESTS=0 allows only this machine's own addresses.
    """
    own = service.own_url(environment)
    base = (settings.base_url or own).rstrip("/")
    if not base and (problem := service.region_problem(environment)):
        raise ModelSetupError(problem)
    host = host_of(base, " or ".join(service.url_variables))
    local = is_loopback(host)
    if not local and environment.get(_SWITCH, "1").strip().lower() in _OFF:
        msg = f"a request to {host} is not allowed: {_SWITCH}=0 admits only loopback addresses"
        raise ModelSetupError(msg)
    is_own = service.is_own(base, host)
    trusted = is_own or local or base == own
    required = service.needs_key and base == (service.url or own)
    variable = settings.api_key_env or " or ".join(service.key_variables)
    ask = trusted and not settings.api_key_env
    token, source, named = _bearer(service, environment) if ask else ("", "", "")
    required = required and not named
    key = _key(settings.api_key_env, environment, service, trusted=trusted, required=required)
    found = dict(headers)
    if key:
        found[service.key_header], source = service.key_form.format(key), ""
    elif named:
        key, variable = token or None, named
        if token:
            found["authorization"] = f"Bearer {token}"
    organization = settings.organization or (trusted and environment.get("OPENAI_ORG_ID"))
    if organization and service.api in (Api.CHAT, Api.RESPONSES):
        found["openai-organization"] = _header(organization, "settings.organization")
    official = is_own or _AZURE_HOSTS.fullmatch(host) is not None
    version = environment.get(service.version_variable, "")
    region = ""
    if service.region_variables and trusted and not key:
        if problem := service.region_problem(environment):
            raise ModelSetupError(problem)
        region, variable = service.region(environment), "AWS_ACCESS_KEY_ID or AWS_PROFILE"
    url = f"{base}{path}"
    there = service_at(host, service)
    return Endpoint(url, host, official, found, key, variable, version, region, source, there)


@functools.lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Return whether `host` names this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@functools.lru_cache(maxsize=256)
def host_of(base: str, variable: str) -> str:
    """Return the host of a model's address, which `settings.base_url` or `variable` names.

    Raises `ModelSetupError` for one that is unusable or has a secret in it; shows none.
    """
    where = f"settings.base_url (or {variable})" if variable else "settings.base_url"
    try:
        parts = urlsplit(base)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if parts.scheme not in {"http", "https"} or not host:
        msg = f"{where} must look like https://host/v1"
        raise ModelSetupError(msg)
    if parts.username or parts.password or parts.query or parts.fragment or "@" in parts.path:
        # A password with a slash in it reads as a path, and what is before it as the host.
        whose = "" if "@" in parts.path else f" for {host}"
        msg = (
            f"{where}{whose} must have no user, password, query or fragment, and %40 for an @ in "
            "its path; put the key into a variable and name it in settings.api_key_env"
        )
        raise ModelSetupError(msg)
    return host


def _key(
    variable: str | None,
    environment: Mapping[str, str],
    service: Service,
    *,
    trusted: bool,
    required: bool,
) -> str | None:
    names = (variable,) if variable else service.key_variables if trusted else ()
    for name in names:
        if key := environment.get(name, "").strip():
            name_secret(name)
            return _header(key, name)
    if variable or required:
        named = variable or service.key_variables[0]
        msg = f"no API key: set the variable {named} in the workers' environment"
        raise ModelSetupError(
            msg + ("" if variable else ", or settings.base_url to another server")
        )
    return None


def _bearer(service: Service, environment: Mapping[str, str]) -> tuple[str, str, str]:
    """Return a token, or the function that returns one, and the variable of either."""
    given, source = service.token_variables or ("", "")
    if token := environment.get(given, "").strip():
        name_secret(given)
        return _header(token, given), "", given
    function = environment.get(source, "").strip()
    return "", function, source if function else ""


def _header(value: str, name: str) -> str:
    if not value.isascii() or not value.isprintable():
        raise ModelSetupError(f"{name} has characters that no HTTP header can carry")
    return value


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
