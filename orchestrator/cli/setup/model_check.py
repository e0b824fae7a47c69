"""The smallest call to each model of a batch, before anything is submitted.

What every run would meet is refused: a key, a model's name, an address. What may pass (a limit of
the rate, a service in trouble, no answer in time) is printed, and the batch goes on. Addresses,
keys and failures are those of workers.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.batches.files.openai_format import PLAIN_AGENT
from stepfleet.orchestrator.errors import ConfigurationError, ModelError
from stepfleet.orchestrator.models.endpoint import ROUTES, Endpoint, ModelSetupError, endpoint_of
from stepfleet.orchestrator.models.failures import refusal
from stepfleet.orchestrator.models.services import SERVICES
from stepfleet.orchestrator.models.signing import Credentials
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.records.text.redaction import redact

if TYPE_CHECKING:
    from httpx import AsyncClient

SECONDS = 10.0
MOST_AT_ONCE = 8
_MOST_READ = 64 * 1024
_FIXES: Mapping[str, str] = {
    ModelErrorCode.QUOTA_EXHAUSTED: "add credit to the account of the key in {key}",
    ModelErrorCode.INVALID_API_KEY: "set {key} to a valid key",
    ModelErrorCode.PERMISSION_DENIED: "allow the key in {key} to use the model",
    ModelErrorCode.MODEL_NOT_FOUND: "correct the agent's model ({model!r}), or the address",
    ModelErrorCode.INVALID_REQUEST: "correct the agent's model ({model!r}), or the address",
}
_OF_THIS_CALL = {
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
}
"""Invalid requests with these statuses may be about this call alone."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The smallest call to the model of an agent."""

    agent: str
    model: str
    endpoint: Endpoint
    url: str
    body: Mapping[str, Any]


def probe_of(config: AgentConfig, environment: Mapping[str, str]) -> Probe | None:
    """Return the call for an agent's model; None for models of packages and of the agent's own.

    There is none either where a function of the workers returns the key.

    Raises `ModelSetupError` where workers with this environment cannot call it. Pure.
    """
    prefix, _, model = config.model.partition(":")
    service, settings = SERVICES.get(prefix), config.settings
    route = ROUTES.get(service.api) if service else None
    if service is None or route is None or config.name == PLAIN_AGENT:
        return None
    headers = {"content-type": "application/json", **route.headers}
    endpoint = endpoint_of(settings, environment, service, path=route.path, headers=headers)
    if endpoint.tokens:  # the workers' own function has the key
        return None
    body = route.smallest(endpoint, model) | settings.extra_body
    return Probe(config.name, model, endpoint, route.url(endpoint, model, False), body)


async def check_calls(
    configs: Iterable[AgentConfig],
    environment: Mapping[str, str],
    say: Callable[[str], None],
    *,
    own_keys: bool = False,
) -> None:
    """Call each model once; `say` gets what may pass. `own_keys`: only with a key from here.

    Raises `ConfigurationError` with the fix where every run would be refused.
    """
    found: dict[tuple[str, str, str | None], Probe] = {}
    for config in (one for listed in configs for one in listed.by_model):
        try:
            probe = probe_of(config, environment)
        except ModelSetupError as error:
            if own_keys:
                continue
            raise ConfigurationError(f"agent {config.name!r}: {error.message}") from None
        if probe and (probe.endpoint.key or not own_keys):
            found.setdefault((probe.url, probe.model, probe.endpoint.key), probe)
    if found:
        refusals = await _call_all(list(found.values()), say)
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

    what = f"agent {probe.agent!r}: a test call to model {probe.model!r} at {probe.url}"
    try:
        async with turns, asyncio.timeout(SECONDS):
            status, error = await _answer(client, probe)
    except TimeoutError:
        say(f"{what} had no answer within {SECONDS:g} s; going on (without the call: --no-check)")
        return None
    except (HTTPError, InvalidURL) as failure:
        say(f"{what} failed: {redact(str(failure)) or type(failure).__name__}; going on")
        return None
    except ModelError as failure:  # AWS's credentials
        return f"{what} failed: {redact(failure.message)}; nothing was submitted"
    if error is None:
        return None
    failed = f"{what} failed: {redact(error.message)}"
    if fix := fix_of(probe, status, error):
        return f"{failed}. Fix: {fix}; nothing was submitted (without this check: --no-check)"
    if error.retryable:
        say(f"{failed}; that may pass, going on")
    return None


def fix_of(probe: Probe, status: int, error: ModelError) -> str | None:
    """Return the fix of a failure that every run would meet; None for all others. Pure."""
    if error.code == ModelErrorCode.INVALID_REQUEST and status in _OF_THIS_CALL:
        return None
    fix = _FIXES.get(error.code)
    key = probe.endpoint.variable or "the variable of settings.api_key_env"
    return fix and fix.format(key=key, model=probe.model)


def _signed(probe: Probe, content: bytes) -> dict[str, str]:
    credentials, endpoint = Credentials(), probe.endpoint
    credentials.refresh()
    return credentials.sign(endpoint.region, probe.url, endpoint.headers, content)


async def _answer(client: "AsyncClient", probe: Probe) -> tuple[int, ModelError | None]:
    """Return the answer's status, and the failure that it stands for."""
    endpoint = probe.endpoint
    content = json.dumps(probe.body).encode()
    headers = dict(endpoint.headers)
    if endpoint.region:
        headers = await asyncio.to_thread(_signed, probe, content)
    sent = client.stream("POST", probe.url, content=content, headers=headers)
    async with sent as answer:
        if answer.is_success:
            return answer.status_code, None
        body = b""
        async for piece in answer.aiter_bytes():
            body += piece
            if len(body) > _MOST_READ:
                break
        return answer.status_code, refusal(
            answer.status_code,
            answer.headers,
            body,
            host=endpoint.host,
            key=endpoint.key,
            now=datetime.now(UTC),
            variable=None,
        )
