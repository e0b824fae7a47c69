"""What the families of Bedrock's models differ in, by the model's id. Pure.

An id is a model's, an inference profile's or an ARN. One that names no family, such as an
application inference profile's, gets only what Converse takes of every model.
"""

import re
from typing import Any

from stepfleet.orchestrator.records.responses import ModelSettings

_CLAUDE = re.compile(r"claude-(?:[a-z]+-)?(\d+)(?:-(\d{1,2}))?(?!\d)")
_NOVA = re.compile(r"amazon\.nova-")
_GPT = re.compile(r"openai\.gpt-")
_CACHES_FROM = (3, 5)
_CACHES_NOT = "claude-3-5-sonnet-20240620"


def provider_of(model: str) -> str:
    """Return the name under which reasoning of the model is kept: no other family gets it."""
    return "bedrock" + ("/claude" if "claude" in model else "/nova" if _NOVA.search(model) else "")


def caches_prompts(model: str) -> bool:
    """Return whether the model takes cache points; others refuse the request."""
    newer = _claude(model) >= _CACHES_FROM and _CACHES_NOT not in model
    return newer or _NOVA.search(model) is not None


def caches_tools(model: str) -> bool:
    """Return whether a cache point may follow the tools."""
    return caches_prompts(model) and "claude" in model


def thinks(model: str, settings: ModelSettings) -> bool:
    """Return whether a Claude thinks: it then refuses to be forced to a call."""
    kind = _thinking(settings).get("type") if "claude" in model else None
    return kind in ("enabled", "adaptive")


def reasoning_fields(model: str, settings: ModelSettings) -> dict[str, Any]:
    """Return the fields of the model's own that say how it is to reason."""
    effort = settings.reasoning_effort
    if "claude" in model:
        thinking = _thinking(settings)
        return {"thinking": thinking} if thinking else {}
    if effort is None:
        return {}
    least = "low" if effort == "minimal" else effort
    if _NOVA.search(model):
        if effort == "none":
            return {"reasoningConfig": {"type": "disabled"}}
        return {"reasoningConfig": {"type": "enabled", "maxReasoningEffort": least}}
    if _GPT.search(model):  # cannot be switched off
        return {"reasoning_effort": "low" if effort == "none" else least}
    return {}


def effort_of(model: str, settings: ModelSettings) -> str | None:
    """Return the effort that Converse itself takes; None where the model has its own field."""
    effort = settings.reasoning_effort
    if effort in (None, "none") or settings.reasoning_budget:
        return None
    if _NOVA.search(model) or _GPT.search(model):
        return None
    return "low" if effort == "minimal" else effort


def _thinking(settings: ModelSettings) -> dict[str, Any]:
    if settings.reasoning_budget:
        return {"type": "enabled", "budget_tokens": settings.reasoning_budget}
    if settings.reasoning_budget == 0 or settings.reasoning_effort == "none":
        return {"type": "disabled"}
    return {"type": "adaptive"} if settings.reasoning_effort else {}


def _claude(model: str) -> tuple[int, int]:
    """Return the version of a Claude; (0, 0) for other models."""
    found = _CLAUDE.search(model)
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)
