"""Decides the address and the key of a call, from settings and environment. Pure.

A key is sent only where it belongs: the default key goes to OpenAI, to the address that the
worker's own environment names, and to this machine. An agent that names another address names
the variable of its key as well.
"""

import functools
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.records.responses import ModelSettings
from stepfleet.orchestrator.records.text.redaction import name_secret

OPENAI_URL = "https://api.openai.com/v1"
_OPENAI_HOSTS = re.compile(r"(?:[^.]+\.)?api\.openai\.com")
_AZURE_HOSTS = re.compile(r"[^.]+\.openai\.azure\.com")
_KEY = "OPENAI_API_KEY"
_SWITCH = "STEPFLEET_ALLOW_MODEL_REQUESTS"
_OFF = {"0", "false", "no", "off"}


class ModelSetupError(ModelError):
    """A model cannot be called as the agent or the worker is set up; trying again is no use."""

    code = ModelErrorCode.SETUP.value


@dataclass(frozen=True)
class Endpoint:
    """The address of one service with the headers that open it."""

    url: str
    host: str
    official: bool
    headers: Mapping[str, str] = field(repr=False)
    key: str | None = field(default=None, repr=False)


def endpoint_of(settings: ModelSettings, environment: Mapping[str, str]) -> Endpoint:
    """Return the endpoint of chat completions.

    Raises `ModelSetupError` for an unusable address, a missing key, or when
    STEPFLEET_ALLOW_MODEL_REQUESTS=0 allows only this machine's own addresses.
    """
    own = environment.get("OPENAI_BASE_URL") or OPENAI_URL
    base = (settings.base_url or own).rstrip("/")
    host = _host_of(base)
    local = is_loopback(host)
    if not local and environment.get(_SWITCH, "1").strip().lower() in _OFF:
        msg = f"a request to {host} is not allowed: {_SWITCH}=0 admits only loopback addresses"
        raise ModelSetupError(msg)
    openai = base.startswith("https:") and _OPENAI_HOSTS.fullmatch(host) is not None
    official = openai or _AZURE_HOSTS.fullmatch(host) is not None
    trusted = openai or local or base == own.rstrip("/")
    key = _key(settings.api_key_env, environment, trusted=trusted, required=base == OPENAI_URL)
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    organization = settings.organization or (trusted and environment.get("OPENAI_ORG_ID"))
    if organization:
        headers["openai-organization"] = _header(organization, "settings.organization")
    return Endpoint(f"{base}/chat/completions", host, official, headers, key)


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
def _host_of(base: str) -> str:
    try:
        parts = urlsplit(base)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if parts.scheme not in {"http", "https"} or not host:
        msg = "settings.base_url (or OPENAI_BASE_URL) must look like https://host/v1"
        raise ModelSetupError(msg)
    if parts.username or parts.password or parts.query or parts.fragment:
        msg = (
            f"settings.base_url (or OPENAI_BASE_URL) for {host} must have no user, password, query "
            "or fragment; put the key into a variable and name it in settings.api_key_env"
        )
        raise ModelSetupError(msg)
    return host


def _key(
    variable: str | None, environment: Mapping[str, str], *, trusted: bool, required: bool
) -> str | None:
    name = variable or _KEY
    key = environment.get(name, "").strip() if variable or trusted else ""
    if key:
        name_secret(name)
        return _header(key, name)
    if variable or required:
        msg = f"no API key: set the variable {name} in the workers' environment"
        raise ModelSetupError(
            msg + ("" if variable else ", or settings.base_url to another server")
        )
    return None


def _header(value: str, name: str) -> str:
    if not value.isascii() or not value.isprintable():
        raise ModelSetupError(f"{name} has characters that no HTTP header can carry")
    return value
