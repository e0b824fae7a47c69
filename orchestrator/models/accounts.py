"""Names the limits of a call: by its model and, where an agent sets them, its address and account.

What a provider refuses or states holds for one account at one address. Agents that name neither
share the name of their model. Pure.
"""

from functools import lru_cache
from hashlib import sha256

from stepfleet.orchestrator.limits.limit import AT, kind_of
from stepfleet.orchestrator.models.services import SERVICES
from stepfleet.orchestrator.records.responses import ModelSettings

_LONGEST = 200
_KNOWN = 1024


def limit_name(model: str, settings: ModelSettings) -> str:
    """Return the name of the limits that a call of `model` is under.

    `openai:m`, or `openai:m at gateway.example/v1 with TEAM_KEY of org-1`: the address without its
    scheme, the variable of the key (never the key), the organization.
    """
    if settings.base_url is None and not settings.api_key_env and not settings.organization:
        return model
    return _named(model, settings.base_url, settings.api_key_env, settings.organization)


@lru_cache(maxsize=_KNOWN)
def _named(model: str, base: str | None, key: str | None, organization: str | None) -> str:
    service = SERVICES.get(kind_of(model))
    home = service.url if service else ""
    own_keys = service.key_variables if service else ()
    where = (base or home).rstrip("/")
    is_home = where == home
    key = None if is_home and key in own_keys[:1] else key
    if is_home and not key and not organization:
        return model
    # An address with a user or a query is refused before its call: they are not to be shown.
    shown = where.partition("://")[2].rpartition("@")[2].partition("?")[0] or "home"
    parts = (shown, f" with {key}" if key else "", f" of {organization}" if organization else "")
    text = " ".join("".join(parts).split())
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} {sha256(text.encode(errors='replace')).hexdigest()[:8]}"
    return f"{model}{AT}{text}"
