"""Whether the agents' models can be called, before anything is submitted.

First without a call: a key is set, the address can be reached. Then the smallest call to each.
"""

import asyncio
import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.batches.files.openai_format import PLAIN_AGENT
from stepfleet.orchestrator.errors import ConfigurationError, ModelError
from stepfleet.orchestrator.models.endpoint import (
    ROUTES,
    Endpoint,
    ModelSetupError,
    endpoint_of,
    host_of,
)
from stepfleet.orchestrator.models.failures import refusal
from stepfleet.orchestrator.models.services import SERVICES, Service
from stepfleet.orchestrator.models.signing import Credentials
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.records.text.redaction import redact
from stepfleet.orchestrator.store.fleet.servers import HealthFinding

if TYPE_CHECKING:
    from httpx import AsyncClient


_CONNECT_SECONDS = 5.0
_PORTS = {"https": 443, "http": 80}


@dataclass(frozen=True, slots=True)
class Target:
    """The address of an agent's model, and the variable that must hold a key (None: no key).

    `signed`: its calls are signed with AWS's credentials.
    """

    base_url: str
    host: str
    port: int
    key: str | None
    signed: bool = False


def target_of(config: AgentConfig, environment: Mapping[str, str]) -> Target | None:
    """Return the target of the agent's model; None for models of packages and of its own. Pure.

    Raises `ConfigurationError` for an unusable address.
    """
    service = SERVICES.get(config.model.partition(":")[0])
    if service is None:
        return None
    settings = config.settings
    base = (settings.base_url or service.own_url(environment)).rstrip("/")
    signed = bool(service.region_variables) and _is_signed(config, service, environment)
    try:
        host = host_of(base, " or ".join(service.url_variables))
    except ModelSetupError as error:
        raise ConfigurationError(f"agent {config.name!r}: {error.message}") from None
    parts = urlsplit(base)
    required = service.needs_key and (base == service.url or not service.url)
    known = (*service.key_variables, *(service.token_variables or ()))
    named = (one for one in known if environment.get(one, "").strip())
    own = next(named, service.key_variables[0]) if required else None
    key = settings.api_key_env or own
    return Target(base, host, parts.port or _PORTS[parts.scheme], key, signed)


def _is_signed(config: AgentConfig, service: Service, environment: Mapping[str, str]) -> bool:
    try:
        return bool(endpoint_of(config.settings, environment, service).region)
    except ModelSetupError as error:
        raise ConfigurationError(f"agent {config.name!r}: {error.message}") from None


def missing_key(agent: str, target: Target, environment: Mapping[str, str]) -> HealthFinding | None:
    """Return the finding about a key that is not set; None where all is well. Pure."""
    if target.key is None or environment.get(target.key, "").strip():
        return None
    return HealthFinding(
        f"model of {agent}",
        f"agent {agent!r}: the model needs an API key, and {target.key} is not set",
        f"set the variable {target.key}, or settings.base_url to another server, or try it "
        "without a provider: run --simulate RULES",
    )


def unsigned(agent: str, target: Target) -> HealthFinding | None:
    """Return the finding about AWS credentials that could not be loaded; None where all is well."""
    if not target.signed:
        return None
    try:
        Credentials().refresh()
    except ModelError as error:
        return HealthFinding(
            f"model of {agent}",
            f"agent {agent!r}: {error.message}",
            "give the workers AWS's usual credentials, or try it without a provider: run "
            "--simulate RULES",
        )
    return None


def unreachable(agent: str, target: Target) -> HealthFinding | None:
    """Return the finding about an unreachable address; None where it can be reached."""
    host, port = target.host, target.port
    proxy = getproxies().get(urlsplit(target.base_url).scheme)
    if proxy and not proxy_bypass(host):
        via = urlsplit(proxy)
        host, port = via.hostname or host, via.port or _PORTS.get(via.scheme, port)
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return HealthFinding(
            f"model of {agent}",
            f"agent {agent!r}: the model endpoint {target.base_url} cannot be reached "
            f"({error.strerror or error})",
            "start it, or check the network, the provider's variables (address, region) and "
            "settings.base_url",
        )
    return None


def examined(
    configs: Iterable[AgentConfig], environment: Mapping[str, str]
) -> Iterator[tuple[str, Target, HealthFinding | None]]:
    """Yield each model's first agent, its target and any finding. Raises as `target_of`."""
    seen = set()
    for config in configs:
        target = target_of(config, environment)
        if target is None or target in seen:
            continue
        seen.add(target)
        name = config.name
        finding = missing_key(name, target, environment) or unsigned(name, target)
        finding = finding or unreachable(name, target)
        yield config.name, target, finding


def check_models(configs: Iterable[AgentConfig], environment: Mapping[str, str]) -> None:
    """Raise `ConfigurationError` where a model has no key, or none of an agent can be reached.

    AWS's credentials count as a key.
    """
    tried: dict[Target, HealthFinding | None] = {}
    for config in configs:
        away: list[HealthFinding | None] = []
        for target in (target_of(one, environment) for one in config.by_model):
            if target and (finding := missing_key(config.name, target, environment)):
                raise ConfigurationError(finding.text)
            if target and target not in tried:
                if finding := unsigned(config.name, target):
                    raise ConfigurationError(finding.text)
                tried[target] = unreachable(config.name, target)
            away.append(tried[target] if target else None)
        if away[0] and all(away):
            raise ConfigurationError(away[0].text)


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
        say(f"{what} had no answer within {SECONDS:g} s; continuing (without the call: --no-check)")
        return None
    except (HTTPError, InvalidURL) as failure:
        say(f"{what} failed: {redact(str(failure)) or type(failure).__name__}; continuing")
        return None
    except ModelError as failure:  # AWS's credentials
        return f"{what} failed: {redact(failure.message)}; nothing was submitted"
    if error is None:
        return None
    failed = f"{what} failed: {redact(error.message)}"
    if fix := fix_of(probe, status, error):
        return f"{failed}. Fix: {fix}; nothing was submitted (without this check: --no-check)"
    if error.retryable:
        say(f"{failed}; that may pass, continuing")
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
