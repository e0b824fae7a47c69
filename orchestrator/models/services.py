"""Services of models: the address of each provider, and the variables that open it. Pure.

A provider is one entry here; one with a protocol of its own has a format in `worker.models` too.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256
from importlib import metadata
from typing import Any

from stepfleet.orchestrator.limits.limit import AT, kind_of
from stepfleet.orchestrator.records.responses import ModelSettings

_REGION = re.compile(r"[a-z]{2,6}(?:-[a-z]{2,12}){1,3}-\d{1,2}")
ENTRY_POINTS = "stepfleet.models"
"""Packages add providers by entry points of this group: `name = "package:factory"`."""
_OWN = "custom"
_OPENAI_IDS = "[!-~]{1,40}"
_DOMAINS = {"cn": "amazonaws.com.cn", "eusc": "amazonaws.eu"}
"""Domains of AWS where they are not its usual one, by the first word of a region."""


class Api(StrEnum):
    """How a service is called."""

    CHAT = "chat completions"
    AZURE = "chat completions of Azure"
    RESPONSES = "responses"
    MESSAGES = "messages"
    GENERATE_CONTENT = "generateContent"
    CONVERSE = "Converse"


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """One provider's service, as the worker's environment describes it.

    `url` is its address unless a variable of `url_variables` or an agent's `settings.base_url`
    names another; "" stands for none. The first variable of `key_variables` that is set has the
    key, which goes to hosts that `hosts` fits, to `url`, and to the address in the variable.
    `needs_key` says whether `url` refuses calls without one. `lacks` names the fields of an agent's
    `settings` that its calls cannot carry. The key goes into `key_header`, as `key_form` says.
    `version_variable` may name the version of the service's interface. Where `region_variables`
    name a region, `url` is that of the region; calls to the provider are then signed with AWS's
    credentials, unless a key is set. `reasoning` is the field of an answer in chat completions
    whose value the service wants back with the answer. `token_variables`, where no key is set,
    name a bearer token, and the function that returns one. `fields` has fields of chat completions
    that it refuses, each with its own word for it or "". `names_authors`: its messages may have the
    field `name`. `call_ids` is the pattern of the ids of calls that it takes, where its protocol
    takes more. `takes_reasoning`: its messages may have the fields of reasoning of its answers.
    """

    api: Api
    url: str = ""
    url_variables: tuple[str, ...] = ()
    key_variables: tuple[str, ...] = ()
    hosts: str = ""
    needs_key: bool = True
    lacks: tuple[str, ...] = ("reasoning_budget",)
    key_header: str = "authorization"
    key_form: str = "Bearer {}"
    version_variable: str = ""
    region_variables: tuple[str, ...] = ()
    reasoning: str = ""
    token_variables: tuple[str, str] | None = None
    fields: tuple[tuple[str, str], ...] = ()
    names_authors: bool = True
    call_ids: str = ""
    takes_reasoning: bool = True

    def own_url(self, environment: Mapping[str, str]) -> str:
        """Return the address that the environment names, else the provider's; "" for none."""
        named = (environment.get(name, "") for name in self.url_variables)
        return (next(filter(None, named), "") or self._home(environment)).rstrip("/")

    def region(self, environment: Mapping[str, str]) -> str:
        """Return the region that the environment names; "" for none or an invalid one."""
        named = (environment.get(name, "").strip() for name in self.region_variables)
        region = next(filter(None, named), "")
        return region if _REGION.fullmatch(region) else ""

    def region_problem(self, environment: Mapping[str, str]) -> str | None:
        """Return what is wrong with the region that the environment names; None for nothing."""
        if not self.region_variables or self.region(environment):
            return None
        for name in self.region_variables:
            if given := environment.get(name, "").strip():
                return f"{name} is {given[:40]!r}, which is not a region; write it like us-east-1"
        return (
            f"no region: set the variable {self.region_variables[0]} in the workers' environment, "
            "as us-east-1"
        )

    def _home(self, environment: Mapping[str, str]) -> str:
        if not self.region_variables:
            return self.url
        region = self.region(environment)
        domain = _DOMAINS.get(region.partition("-")[0], "amazonaws.com")
        return self.url.format(region=region, domain=domain) if region else ""

    def is_own(self, base: str, host: str) -> bool:
        """Return whether an address is the provider's: HTTPS, and one of its hosts."""
        known = self.hosts and re.fullmatch(self.hosts, host)
        return bool(known) and base.startswith("https:")


def _compatible(url: str, variable: str, key: str = "", **fields: Any) -> Service:
    """Return a service of OpenAI's protocol."""
    keys = (key,) if key else ()
    return Service(Api.CHAT, url, (variable,), keys, needs_key=bool(key), **fields)


def service_at(host: str, called: Service) -> Service:
    """Return the service that an agent reaches at `host`, whatever the name it calls it by.

    Only services of chat completions are called by other names; an unknown host has `called`.
    """
    if called.api is not Api.CHAT:
        return called
    known = (one for one in SERVICES.values() if one.api is Api.CHAT and f"//{host}/" in one.url)
    return next(known, called)


def problem_with(model: str, settings: Mapping[str, Any]) -> str | None:
    """Return why no call of `model` can be made with these settings; None where one can.

    `settings` are those that are set. Prefixes that are none of `SERVICES` belong to packages,
    which must be installed here too.
    """
    prefix, _, name = model.partition(":")
    if not prefix or not name:
        return f"{model!r} must name its provider; write 'openai:{model.strip(':')}'"
    if len(model) > LONGEST_MODEL or not model.isprintable():
        return f"{model[:60]!r}: write at most {LONGEST_MODEL} characters, all of them printable"
    service = SERVICES.get(prefix)
    if service is None:
        return None if _is_of_a_package(prefix) else _unknown(model, prefix)
    lacking = [name for name in service.lacks if name in settings]
    if lacking:
        return (
            f"{model!r}: {prefix} takes no {lacking[0]!r}; leave settings.{lacking[0]} out, or use "
            "a model of another provider"
        )
    if service.api is Api.CONVERSE and "reasoning_budget" in settings and "claude" not in name:
        return (
            f"{model!r}: field 'reasoning_budget' is for Claude's models by name; use "
            "settings.reasoning_effort, or settings.extra_body with additionalModelRequestFields"
        )
    return None


@lru_cache(maxsize=256)
def _is_of_a_package(prefix: str) -> bool:
    """Return whether models of this prefix are an agent's own, or of an installed package."""
    return prefix == _OWN or bool(metadata.entry_points(group=ENTRY_POINTS, name=prefix))


def _unknown(model: str, prefix: str) -> str:
    unknown = f"{model!r}: there is no provider {prefix!r}"
    if near := difflib.get_close_matches(prefix, SERVICES, 1):
        return f"{unknown}; did you mean {near[0]!r}?"
    return (
        f"{unknown} (known: {', '.join(sorted(SERVICES))}); write 'compatible:' and "
        "settings.base_url for a service that is compatible with OpenAI's, or install the package "
        f"that has it here and on the workers (its entry point is in {ENTRY_POINTS!r})"
    )


LONGEST_MODEL = 500
MOST_MODELS = 8
_OF_ONE_SERVICE = ("base_url", "api_key_env", "organization")


def problem_of_list(models: tuple[str, ...], settings: Mapping[str, Any]) -> str | None:
    """Return why these models cannot stand in for each other with these settings."""
    twice = [one for one in models if models.count(one) > 1]
    if twice:
        return f"{twice[0]!r} is in the list twice; name each model once"
    if len(models) > MOST_MODELS:
        return f"the list has {len(models)} models; name {MOST_MODELS} at most"
    own = [one for one in models if one.startswith(f"{_OWN}:")]
    if own and len(models) > 1:
        return f"{own[0]!r}: a list has models by name; write 'provider:name'"
    providers = sorted({one.partition(":")[0] for one in models})
    named = [name for name in _OF_ONE_SERVICE if settings.get(name)]
    if len(providers) > 1 and named:
        return (
            f"settings.{named[0]} is of one service, and the list has models of "
            f"{' and '.join(providers)}; set each provider's variables on the workers instead"
        )
    return None


def environment_of(root: str) -> dict[str, str]:
    """Return the variables that send the calls of all services to one server at `root`."""
    found: dict[str, str] = {}
    for service in SERVICES.values():
        path = "/v1" if service.api in (Api.CHAT, Api.RESPONSES) else ""
        found |= dict.fromkeys(service.url_variables[:1], f"{root}{path}")
        found |= dict.fromkeys(service.key_variables[:1], "simulated")
    return found


SERVICES: Mapping[str, Service] = {
    "openai": Service(
        Api.CHAT,
        "https://api.openai.com/v1",
        ("OPENAI_BASE_URL",),
        ("OPENAI_API_KEY",),
        r"(?:[^.]+\.)?api\.openai\.com",
        call_ids=_OPENAI_IDS,
    ),
    "openai-responses": Service(
        Api.RESPONSES,
        "https://api.openai.com/v1",
        ("OPENAI_BASE_URL",),
        ("OPENAI_API_KEY",),
        r"(?:[^.]+\.)?api\.openai\.com",
        lacks=("reasoning_budget", "stop", "seed"),
    ),
    "anthropic": Service(
        Api.MESSAGES,
        "https://api.anthropic.com",
        ("ANTHROPIC_BASE_URL",),
        ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
        r"(?:[^.]+\.)?anthropic\.com",
        lacks=("temperature", "top_p", "seed", "organization"),
    ),
    "google": Service(
        Api.GENERATE_CONTENT,
        "https://generativelanguage.googleapis.com",
        ("GEMINI_BASE_URL", "GOOGLE_GEMINI_BASE_URL"),
        ("GOOGLE_API_KEY", "GEMINI_API_KEY"),
        r"generativelanguage\.googleapis\.com",
        lacks=("organization",),
        key_header="x-goog-api-key",
        key_form="{}",
        version_variable="GOOGLE_GENAI_API_VERSION",
    ),
    "bedrock": Service(
        Api.CONVERSE,
        "https://bedrock-runtime.{region}.{domain}",
        ("AWS_ENDPOINT_URL_BEDROCK_RUNTIME", "AWS_ENDPOINT_URL"),
        ("AWS_BEARER_TOKEN_BEDROCK",),
        r"(?:[^.]+\.)?bedrock-runtime(?:-fips)?\.[a-z0-9-]+\."
        r"(?:vpce\.)?(?:amazonaws\.com(?:\.cn)?|amazonaws\.eu|api\.aws)",
        needs_key=False,
        lacks=("seed", "organization"),
        region_variables=("AWS_REGION", "AWS_DEFAULT_REGION"),
    ),
    "azure": Service(
        Api.AZURE,
        url_variables=("AZURE_OPENAI_ENDPOINT",),
        key_variables=("AZURE_OPENAI_API_KEY",),
        hosts=r"[^.]+\.(?:openai|cognitiveservices|services\.ai)\.azure\.com",
        key_header="api-key",
        key_form="{}",
        version_variable="OPENAI_API_VERSION",
        token_variables=("AZURE_OPENAI_AD_TOKEN", "AZURE_OPENAI_AD_TOKEN_PROVIDER"),
        call_ids=_OPENAI_IDS,
        takes_reasoning=False,
    ),
    "compatible": Service(Api.CHAT, url_variables=("COMPATIBLE_BASE_URL",), needs_key=False),
    "deepseek": _compatible(
        "https://api.deepseek.com/v1",
        "DEEPSEEK_BASE_URL",
        "DEEPSEEK_API_KEY",
        reasoning="reasoning_content",
    ),
    "groq": _compatible(
        "https://api.groq.com/openai/v1",
        "GROQ_BASE_URL",
        "GROQ_API_KEY",
        names_authors=False,
        takes_reasoning=False,
    ),
    "litellm": _compatible("http://localhost:4000/v1", "LITELLM_BASE_URL"),
    "llamacpp": _compatible("http://localhost:8080/v1", "LLAMACPP_BASE_URL"),
    "mistral": _compatible(
        "https://api.mistral.ai/v1",
        "MISTRAL_BASE_URL",
        "MISTRAL_API_KEY",
        fields=(("seed", "random_seed"), ("stream_options", "")),
        names_authors=False,
        call_ids="[A-Za-z0-9]{9}",
        takes_reasoning=False,
    ),
    "ollama": _compatible("http://localhost:11434/v1", "OLLAMA_BASE_URL"),
    "openrouter": _compatible(
        "https://openrouter.ai/api/v1",
        "OPENROUTER_BASE_URL",
        "OPENROUTER_API_KEY",
        reasoning="reasoning_details",
    ),
    "vllm": _compatible("http://localhost:8000/v1", "VLLM_BASE_URL"),
}
"""Services by the prefix of a model's name."""


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
