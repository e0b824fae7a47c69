"""The memory of a step: the messages that its request shows, and a summary when one is due.

Decides nothing about limits (`memory.window` does); makes the summary's model call, and journals
it before anything else may fail, so that it is paid for once.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from stepfleet.orchestrator.errors import AgentMemoryError, ContextWindowError
from stepfleet.orchestrator.memory.conversation import LONGEST_MESSAGE, summary_request
from stepfleet.orchestrator.memory.pruning import Count, chosen, estimate_tokens
from stepfleet.orchestrator.memory.window import History, advance, shown, token_budget
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.memory_window import Remembered, Summary, Window
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.usage import UsageStats
from stepfleet.worker.attempt.circuit import behind_circuit
from stepfleet.worker.attempt.fallback import first_answer
from stepfleet.worker.attempt.made_calls import is_used, made_by
from stepfleet.worker.attempt.usage import call_cost, counted
from stepfleet.worker.leases.lease import Lease
from stepfleet.worker.ports import AgentCode, Call, Ports

SHORTER = 8
"""By how much messages are shortened for a summary that was too long for its model."""


@dataclass(frozen=True, slots=True)
class AssembledMemory:
    """The messages that a request shows; `remembered` is the change to the memory, if any."""

    messages: tuple[Message, ...]
    remembered: Remembered | None = None


async def assemble_memory(
    claim: Claim, history: History, agent: AgentCode, lease: Lease, ports: Ports
) -> AssembledMemory:
    """Return the conversation under the run's memory policy.

    Raises `ModelError` when a summary cannot be made, `AgentMemoryError` when a policy fails.
    """
    policy = claim.config.memory
    before = claim.state.window or Window()
    counted = token_budget(policy, before) is not None
    count = ports.tokens(claim.config.model) if counted else estimate_tokens
    remembered = claim.journal.remembered
    window = remembered.window if remembered else advance(before, history, policy, count)
    if remembered is None and window != before:
        remembered = Remembered(window=window)
        if policy.summarize_after is not None:
            response, remembered = await _summarized(claim, history, window, agent, lease, ports)
            await _note(claim, remembered, lease, ports)
            is_used(lease, response, ports)
            window = remembered.window
    if remembered and remembered.summary:
        history = replace(history, summary=remembered.summary)
    messages = shown(window, history, policy, count)
    if policy.custom is not None:
        messages = await chosen(agent.memory_policy(policy.custom), messages, claim.state)
    return AssembledMemory(messages, remembered)


async def _summarized(
    claim: Claim, history: History, window: Window, agent: AgentCode, lease: Lease, ports: Ports
) -> tuple[LLMResponse, Remembered]:
    before = claim.state.window.since if claim.state.window else 0
    generate = partial(agent.generate, made=made_by(lease, ports))
    ask = behind_circuit(claim, agent, ports, generate)
    response = await _ask(claim, history, history.between(before, window.since), ask, ports.tokens)
    if not response.content.strip():
        raise AgentMemoryError("the model returned an empty summary of the conversation")
    model = response.fallback.model if response.fallback else _models(claim)[0]
    usage = response.usage or UsageStats()
    summary = Summary(
        text=response.content.strip(),
        model=response.model or model,
        service_tier=response.service_tier,
        usage=usage.model_copy(update={"llm_calls": 1}),
        usage_reported=response.usage is not None and not response.usage_estimated,
        cost_usd=call_cost(response, model, claim.config, ports),
    )
    window = window.model_copy(update={"summary": claim.step})
    return response, Remembered(window=window, summary=summary)


async def _ask(
    claim: Claim,
    history: History,
    messages: tuple[Message, ...],
    ask: Call,
    count: Callable[[str], Count],
) -> LLMResponse:
    models = _models(claim)
    earlier = history.summary.text if history.summary else None
    settings = claim.config.settings

    def shorter(request: ModelRequest, _: ContextWindowError) -> ModelRequest:
        longest = LONGEST_MESSAGE // SHORTER
        return summary_request(request.model, settings, earlier, messages, longest)

    request = summary_request(models[0], settings, earlier, messages)
    response, sent = await first_answer(request, models, ask, shorter)
    return counted(response, sent, count(sent.model))


def _models(claim: Claim) -> tuple[str, ...]:
    own = claim.config.memory.summary_model
    return (own,) if own else claim.config.models


async def _note(claim: Claim, remembered: Remembered, lease: Lease, ports: Ports) -> None:
    ports.crash("before-journal")
    held = await ports.store.journal(claim, lease.seconds, remembered=remembered)
    lease.remembered = remembered
    ports.crash("after-journal")
    lease.apply(held)
    if lease.interruption:
        await asyncio.sleep(0)
