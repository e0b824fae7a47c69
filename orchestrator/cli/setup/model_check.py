"""A call of one token to each model of a batch, before anything is submitted.

What every run would meet is refused: a key, a model's name, an address. What may pass (a limit of
the rate, a service in trouble, no answer in time) is said, and the batch goes on. Keys go where
workers send them, and nowhere else.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.batches.openai_format import PLAIN_AGENT
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models.services import SERVICES, Api, Service
from stepfleet.orchestrator.records.text.redaction import redact

if TYPE_CHECKING:
    from httpx import AsyncClient

_CALLED = (Api.CHAT, Api.MESSAGES)
"""Services of other protocols are not called here."""
SECONDS = 10.0
MOST_AT_ONCE = 8
SWITCH = "STEPFLEET_ALLOW_MODEL_REQUESTS"
_OFF = {"0", "false", "no", "off"}
_LONGEST = 300
_MOST_READ = 64 * 1024
_LOOPBACK = re.compile(r"localhost|.+\.localhost|127\.\d+\.\d+\.\d+|::1")
_PASSING = {408, 409, 425, 429}
_VAGUE = {400, 403, 422}
"""Statuses that leave the reason to the message; 400 and 422 may be about this call alone."""
_SERVER_ERRORS = 500
_QUOTA = re.compile(
    r"insufficient.?(quota|balance|credit|funds)|billing_|payment_required", re.IGNORECASE
)
_BAD_NAME = re.compile(
    r"model_not_found|invalid_model|\bmodel\b.{0,120}?(does not exist|not found|no such|invalid)"
    r"|no such model|invalid model",
    re.IGNORECASE,
)
_BAD_KEY = re.compile(
    r"api[ _-]?key.{0,40}(not valid|invalid|expired)|(invalid|incorrect) api", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Probe:
    """The call to one model at one address; `key` is the variable of the key that goes with it."""

    agent: str
    model: str
    base: str
    key: str
    url: str = field(compare=False)
    body: Mapping[str, Any] = field(compare=False)
    headers: Mapping[str, str] = field(compare=False, repr=False)
    has_key: bool = field(default=False, compare=False)


def probe_of(config: AgentConfig, environment: Mapping[str, str]) -> Probe | None:
    """Return the call for an agent's model; None for models of packages and of the agent's own.

    None also where the environment forbids calls to other machines, or no address is known. Pure.
    """
    prefix, _, model = config.model.partition(":")
    service, settings = SERVICES.get(prefix), config.settings
    if service is None or service.api not in _CALLED or config.name == PLAIN_AGENT:
        return None
    own = service.own_url(environment)
    base = (settings.base_url or own).rstrip("/")
    host = _host_of(base)
    is_local = _LOOPBACK.fullmatch(host) is not None
    if not host or (environment.get(SWITCH, "1").strip().lower() in _OFF and not is_local):
        return None
    official = service.is_own(base, host)
    names = (settings.api_key_env,) if settings.api_key_env else service.key_variables
    trusted = settings.api_key_env or official or is_local or base == own
    named = [name for name in names if environment.get(name, "").strip()] if trusted else []
    value = environment[named[0]].strip() if named else ""
    has_key = bool(value) and value.isascii() and value.isprintable()
    headers = _headers(service, value if has_key else "", settings.organization)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "ping"}],
        service.newest_limit if official else "max_tokens": 1,
        **(settings.extra_body or {}),
    }
    path = "/v1/messages" if service.api is Api.MESSAGES else "/chat/completions"
    key = (*named, *names, "the key's variable")[0]
    return Probe(config.name, model, base, key, f"{base}{path}", body, headers, has_key)


def _host_of(base: str) -> str:
    """Return the host of an address; empty for one that is none."""
    try:
        return urlsplit(base).hostname or ""
    except ValueError:
        return ""


def _headers(service: Service, key: str, organization: str | None) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if key:
        headers[service.key_header] = service.key_form.format(key)
    if service.api is Api.MESSAGES:
        headers["anthropic-version"] = "2026-10-21"
    elif organization:
        headers["openai-organization"] = organization
    return headers


def check_calls(
    configs: Iterable[AgentConfig],
    environment: Mapping[str, str],
    say: Callable[[str], None],
    *,
    own_keys: bool = False,
) -> None:
    """Call each model once; `say` gets what may pass. `own_keys`: only with a key from here.

    Raises `ConfigurationError` with the fix where every run would be refused.
    """
    found: dict[tuple[str, str, str], Probe] = {}
    for config in configs:
        probe = probe_of(config, environment)
        if probe and (probe.has_key or not own_keys):
            found.setdefault((probe.base, probe.model, probe.key), probe)
    if found:
        refusals = asyncio.run(_call_all(list(found.values()), say))
        if refusals and not own_keys:
            raise ConfigurationError(refusals[0])
        if refusals:
            msg = f"{refusals[0]} (with this client's key; if the workers have another: --no-check)"
            raise ConfigurationError(msg)


async def _call_all(probes: list[Probe], say: Callable[[str], None]) -> list[str]:
    from httpx import AsyncClient  # noqa: PLC0415 - a tenth of a second, for real models only

    turns = asyncio.Semaphore(MOST_AT_ONCE)
    async with AsyncClient(timeout=None) as client:  # noqa: S113 - each call has its own limit
        refusals = await asyncio.gather(*(_call(one, client, turns, say) for one in probes))
    return [one for one in refusals if one]


async def _call(
    probe: Probe, client: "AsyncClient", turns: asyncio.Semaphore, say: Callable[[str], None]
) -> str | None:
    from httpx import HTTPError, InvalidURL  # noqa: PLC0415 - as above

    what = f"agent {probe.agent!r}: a test call to model {probe.model!r} at {probe.base}"
    try:
        async with turns, asyncio.timeout(SECONDS):
            status, answer = await _posted(client, probe)
    except TimeoutError:
        say(f"{what} had no answer within {SECONDS:g} s; going on (without the call: --no-check)")
        return None
    except (HTTPError, InvalidURL) as error:
        say(f"{what} failed: {redact(str(error)) or type(error).__name__}; going on")
        return None
    text = redact(_message_of(answer))[:_LONGEST]
    fix = fix_of(probe, status, text)
    said = f"{what} was answered {status}: {text}"
    if fix:
        return f"{said}. Fix: {fix}; nothing was submitted (without this check: --no-check)"
    if status >= _SERVER_ERRORS or status in _PASSING:
        say(f"{said}; that may pass, going on")
    return None


def fix_of(probe: Probe, status: int, text: str) -> str | None:
    """Return the fix of an answer that every run would get; None for all others. Pure."""
    if status < HTTPStatus.MULTIPLE_CHOICES:
        return None
    vague = status in _VAGUE
    fix = None
    if status == HTTPStatus.PAYMENT_REQUIRED or _QUOTA.search(text):
        fix = f"add credit to the account of the key in {probe.key}"
    elif status == HTTPStatus.UNAUTHORIZED or (vague and _BAD_KEY.search(text)):
        fix = f"set {probe.key} to a valid key"
    elif (vague or status == HTTPStatus.NOT_FOUND) and _BAD_NAME.search(text):
        fix = f"correct the agent's model ({probe.model!r})"
    elif status == HTTPStatus.FORBIDDEN:
        fix = f"allow the key in {probe.key} to use the model"
    elif status < _SERVER_ERRORS and not vague and status not in _PASSING:
        fix = f"correct the agent's model, or the address ({probe.base})"
    return fix


async def _posted(client: "AsyncClient", probe: Probe) -> tuple[int, bytes]:
    """Return the answer's status, and as much of its body as an error has."""
    content = orjson.dumps(probe.body)
    sent = client.stream("POST", probe.url, content=content, headers=dict(probe.headers))
    async with sent as answer:
        body = b""
        async for piece in answer.aiter_bytes():
            body += piece
            if len(body) > _MOST_READ:
                break
        return answer.status_code, body


def _message_of(body: bytes) -> str:
    """Return the code and the message of an error's body, or its beginning."""
    try:
        error = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:_LONGEST].decode(errors="replace").strip()
    error = error.get("error", error) if isinstance(error, dict) else error
    if not isinstance(error, dict):
        return str(error)
    parts = (error.get("code"), error.get("type"), error.get("message") or error.get("detail"))
    return " ".join(str(one) for one in parts if one)
