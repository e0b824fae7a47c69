"""Tokens and cost of a model call; usage that its provider does not report is estimated.

So token limits and budgets bind on any server, and a call that failed while its provider was
working is listed with its estimated cost.
"""

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.errors import ModelError, ModelTimeoutError
from stepfleet.orchestrator.limits.estimates import FIRST_OUTPUT
from stepfleet.orchestrator.memory.pruning import Count, text_tokens
from stepfleet.orchestrator.models.pricing.loading import stated_cost
from stepfleet.orchestrator.models.pricing.prices import address_of, tier_of
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.ledger import bare_name
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.usage import FailedCall, Spent, UsageStats, bounded_cost
from stepfleet.worker.ports import Ports

LONGEST_COUNTED = 100_000
"""Characters; of a longer text a quarter is taken, for looking through it holds up the others."""
_CHARACTERS_PER_TOKEN = 4


def counted(response: LLMResponse, request: ModelRequest, count: Count) -> LLMResponse:
    """Return the response with a usage: its own, or an estimate that is marked as one.

    Counts that the provider has stated stay. `count` counts the tokens of a message. Answers from
    the response cache have used nothing.
    """
    if response.usage is not None or (response.cache is not None and response.cache.hit):
        return response
    completion = _tokens(response.content) + _tokens(response.reasoning_text)
    for call in response.tool_calls or ():
        completion += _tokens(call.name) + _tokens(_text(call.arguments))
    usage = _with_stated(_usage(request, completion, count), response.partial_usage)
    return response.model_copy(update={"usage": usage, "usage_estimated": True})


def _with_stated(estimate: UsageStats, stated: UsageStats | None) -> UsageStats:
    """Return an estimate with the counts that were stated.

    Of a total, the prompt is as large as estimated: a completion may have reasoning that nobody
    sees.
    """
    if stated is None:
        return estimate
    prompt, completion = estimate.prompt_tokens, estimate.completion_tokens
    if stated.prompt_tokens or stated.completion_tokens:
        whole = usage_of(stated.prompt_tokens or prompt, stated.completion_tokens or completion)
        cache = {name: getattr(stated, name) for name in ("cached_tokens", "cache_write_tokens")}
        return whole.model_copy(update=cache)
    prompt = min(prompt, max(stated.total_tokens - completion, 0))
    return usage_of(prompt, stated.total_tokens - prompt)


def spent_in_vain(
    error: ModelError, request: ModelRequest, claim: Claim, ports: Ports
) -> Spent | None:
    """Return what a failed call may have cost; None where its provider had no part in it.

    A usage is reported before the answer is over: it counts, and output of which more came than it
    has is estimated.
    """
    if error.received is None:
        is_open = isinstance(error, ModelTimeoutError)
        return spent_without_answer(request, claim, ports) if is_open else None
    most, reported = request.settings.max_tokens, error.usage
    came = error.received if most is None else min(error.received, most)
    if reported is None or not reported.prompt_tokens:  # proxies begin with zeros
        completion = max(came, reported.completion_tokens if reported else 0)
        usage = _usage(request, completion, ports.tokens(request.model))
    elif came > reported.completion_tokens:
        total = reported.prompt_tokens + came
        usage = reported.model_copy(update={"completion_tokens": came, "total_tokens": total})
    else:
        usage = reported
    return _spent(request, usage, claim.config, ports, estimated=usage is not reported)


def spent_without_answer(request: ModelRequest, claim: Claim, ports: Ports) -> Spent:
    """Return what a call may have cost of whose answer nothing came.

    Its own request; output as far as `max_tokens` allows, without that as much as the run's calls
    have had on average.
    """
    before = claim.state.session_usage
    usual = before.completion_tokens // max(before.llm_calls, 1) or FIRST_OUTPUT
    try:
        usage = _usage(request, request.settings.max_tokens or usual, ports.tokens(request.model))
        return _spent(request, usage, claim.config, ports, estimated=True)
    except Exception:  # noqa: BLE001 - code of prices or of a provider: the call failed all the same
        return Spent(0, 0.0, model=bare_name(request.model))


def _spent(
    request: ModelRequest,
    usage: UsageStats,
    config: AgentConfig,
    ports: Ports,
    *,
    estimated: bool,
) -> Spent:
    tier = tier_of(request.settings.service_tier)
    response = LLMResponse.model_construct(usage=usage, model=request.model, service_tier=tier)
    cost = call_cost(response, request.model, config, ports)
    return Spent(usage.total_tokens, cost, estimated, usage, bare_name(request.model), tier)


def spent_on(
    response: LLMResponse, request: ModelRequest, config: AgentConfig, ports: Ports
) -> Spent:
    """Return what an answer that is none has cost: exactly that, where its usage was reported."""
    usage = response.usage or UsageStats()
    model = response.model or bare_name(request.model)
    cost = call_cost(response, request.model, config, ports)
    tier = response.service_tier
    return Spent(usage.total_tokens, cost, response.usage_estimated, usage, model, tier)


def failed_call(request: ModelRequest, error: ModelError) -> FailedCall:
    """Return the record of a call that failed, with what it may have cost."""
    spent = error.spent or Spent(0, 0.0)
    info = error.to_info()
    return FailedCall(
        model=request.model,
        code=info.code,
        message=info.message,
        ambiguous=error.spent is not None or isinstance(error, ModelTimeoutError),
        tokens=spent.tokens,
        cost_usd=spent.cost_usd,
        estimated=spent.tokens > 0 and spent.estimated,
        usage=spent.usage,
        service_tier=spent.service_tier,
    )


def call_cost(response: LLMResponse, model_name: str, config: AgentConfig, ports: Ports) -> float:
    """Return the cost of a response in USD, 0 where its usage is unknown.

    In the tier that the response names. `model_name` is the one that was called, and is used where
    the response names none. Prices are foreign input: costs are bounded.
    """
    usage = response.usage
    if usage is None:
        return 0.0
    model = response.model or model_name
    if config.pricing:
        cost = stated_cost(config.pricing, (model, model_name), usage, response.service_tier)
        if cost is not None:
            return bounded_cost(cost)
    address = address_of(model_name, config.settings.base_url)
    return bounded_cost(ports.cost(model, usage, response.service_tier, address))


def _usage(request: ModelRequest, completion: int, count: Count) -> UsageStats:
    prompt = sum(map(count, request.messages))
    prompt += sum(_tokens(spec.to_json()) for spec in request.tools)
    return usage_of(prompt, completion)


def usage_of(prompt: int, completion: int) -> UsageStats:
    """Return the usage of one call."""
    return UsageStats.model_construct(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        llm_calls=1,
    )


def _tokens(text: str) -> int:
    if len(text) > LONGEST_COUNTED:
        return len(text) // _CHARACTERS_PER_TOKEN
    return text_tokens(text)


def _text(arguments: object) -> str:
    return exact_json.text(arguments)
