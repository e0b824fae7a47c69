"""Whether model calls can work from here: a key is set, and the address can be reached.

Sends no prompt and no key: it only opens a connection. Runs before anything is submitted.
"""

import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.errors import ConfigurationError, ModelError
from stepfleet.orchestrator.models.endpoint import ModelSetupError, endpoint_of, host_of
from stepfleet.orchestrator.models.services import SERVICES, Service
from stepfleet.orchestrator.models.signing import Credentials
from stepfleet.orchestrator.store.fleet.servers import HealthFinding

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
    """Return the finding about AWS's credentials that cannot be had; None where all is well."""
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
