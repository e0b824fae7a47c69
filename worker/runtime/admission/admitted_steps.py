"""A store of steps whose model calls keep the limits of the fleet.

A step without a grant is given back before its call: it holds no slot then, and no message. The
order of writes lets each crash heal: a step is due again after the grace time until it is in a
line; a grant that nobody renews is dispatched again, then taken back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.limits.estimates import (
    Amounts,
    OutputEstimates,
    charged,
    reserved,
    total,
)
from stepfleet.orchestrator.limits.limit import names_of
from stepfleet.orchestrator.memory.pruning import estimate_tokens
from stepfleet.orchestrator.protocol.claim import (
    Claim,
    Committed,
    Held,
    Refusal,
    Refused,
    StepHint,
)
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.orchestrator.records.memory_window import Remembered
from stepfleet.orchestrator.records.messages import Message
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.run.results import LostAttempt
from stepfleet.orchestrator.records.tools import ToolCallRecord
from stepfleet.orchestrator.records.usage import Fallback, UsageStats
from stepfleet.orchestrator.store.admission.calls import (
    GRANTED,
    WAITS,
    Grant,
    Operation,
    Request,
    charging,
    refunding,
    settling,
    throttling,
)
from stepfleet.orchestrator.store.admission.limit_settings import short_of
from stepfleet.orchestrator.store.runs.steps import StepStore
from stepfleet.worker.runtime.admission.gate import Gate
from stepfleet.worker.step import CANCELLED

TOOL_SECONDS = 0.25
"""So long a call may stay in flight behind its answer; tools that take longer hold no limit."""
_RELEASED = partial(Verdict, Move.RELEASE)
LOOK_AGAIN_MS = "100"
_OVER = frozenset(
    {Refused.UNKNOWN, Refused.ENDED, Refused.PAUSED, Refused.STALE, Refused.AHEAD, Refused.EARLY}
)
"""Refusals after which nobody will use the grant of that step."""


class AdmittedSteps:
    """Claims, journals and commits by `store`, with grants by `gate`."""

    def __init__(self, store: StepStore, gate: Gate) -> None:
        self._store = store
        self._gate = gate
        self._outputs = OutputEstimates()

    async def claim(self, hint: StepHint, token: str) -> Claim | Refusal:
        """Take the step, if its limits have room or it needs none. Raises `StoreError`."""
        gate = self._gate
        if not gate.active:
            return await self._store.claim(hint, token)
        reading = gate.calls.request_grant(hint.run_id)
        claim = await self._store.claim(hint, token)
        grant = Grant.loaded(await reading)
        if isinstance(claim, Refusal):
            if grant is not None and grant.step == hint.step and claim.why in _OVER:
                await gate.call(refunding(hint))
                await self._store.unshelve(hint.run_id)
            return claim
        request = self._request(claim) if claim.journal.response is None else None
        return claim if request is None else await self._admitted(claim, request, grant)

    async def _admitted(
        self, claim: Claim, request: Request, grant: Grant | None
    ) -> Claim | Refusal:
        gate, hint = self._gate, claim.hint
        if grant is not None and grant.step == hint.step:
            gate.use(hint)
            return replace(claim, waited=grant.waited, waited_for=short_of(grant.why))
        try:
            word = await gate.call(request.operation("try"))
        except Exception:
            # Not to be taken for a lost worker: it is due again after the grace time.
            await self._store.commit(claim, _RELEASED(claim.state), Events([]), publish=False)
            raise
        if word == GRANTED:
            gate.use(hint)
            return claim
        return await self._put_back(claim, request)

    async def journal(
        self,
        claim: Claim,
        seconds: float,
        *,
        response: LLMResponse | None = None,
        started: tuple[int, ...] = (),
        results: Mapping[int, ToolCallRecord] | None = None,
        remembered: Remembered | None = None,
        losses: tuple[LostAttempt, ...] = (),
    ) -> Held:
        """Journal by the store. An answer ends the call, however long its tools take."""
        if response is not None and claim.run_id in self._gate.held:
            made = 0 if response.cache is not None and response.cache.hit else 1
            usage = (response.usage or UsageStats()).model_copy(update={"llm_calls": made})
            operations = self._settling(claim, usage, response.fallback)
            self._gate.end_later(claim.hint, TOOL_SECONDS, operations)
        return await self._store.journal(
            claim,
            seconds,
            response=response,
            started=started,
            results=results,
            remembered=remembered,
            losses=losses,
        )

    async def commit(self, claim: Claim, verdict: Verdict, events: Events) -> Committed:
        """Commit by the store; settle the call, and request the grant of the next one."""
        gate = self._gate
        if not gate.active and claim.run_id not in gate.held:
            return await self._store.commit(claim, verdict, events)
        following = self._following(claim, verdict)
        again = following is not None and verdict.refused
        if again:
            verdict = replace(verdict, delay=0.0)
        publish = following is None
        done = await self._store.commit(claim, verdict, events, publish=publish)
        if done.wanted or not done.applied:
            return done
        if verdict.move is Move.RELEASE:  # whoever takes the step over uses its grant
            gate.forget(claim.hint)
            return done
        self._learn(claim, verdict)
        gate.end(self._ending(claim, verdict))
        gate.forget(claim.hint)
        if following is not None and done.status == "in_progress":
            await self._wait(following, "again" if again else "ask")
        return done

    # ------------------------------------------------------------------ grants

    async def _put_back(self, claim: Claim, request: Request) -> Claim | Refusal:
        """Release a step without a grant, and have it wait. A cancelled one goes on, to its end."""
        done = await self._store.commit(claim, _RELEASED(claim.state), Events([]), publish=False)
        if done.wanted:
            state = claim.state.model_copy(update={"stop_requested": CANCELLED})
            return replace(claim, state=state)
        self._gate.crash("step-put-back")
        if done.applied and done.status == "in_progress":
            await self._wait(request, "ask")
        return Refusal(Refused.LIMITED, LOOK_AGAIN_MS)

    async def _wait(self, request: Request, op: str) -> None:
        """Request a grant for a step that nobody holds: it is dispatched with it, now or later."""
        if await self._gate.call(request.operation(op)) == WAITS:
            self._gate.crash("limits-requested")
            await self._store.shelve(request.hint)

    def _following(self, claim: Claim, verdict: Verdict) -> Request | None:
        """Return the request of the step after that verdict; None where none follows at once."""
        if verdict.refused and verdict.move is Move.RETRY:
            request = self._request(claim)
            is_limited = request is not None and request.names[0] == claim.config.model
            return request if is_limited else None
        if verdict.move is not Move.CONTINUE or verdict.delay:
            return None
        result = verdict.logged.result if verdict.logged else None
        usage = result.usage if result else None
        prompt, cached = None, 0
        if usage is not None and usage.total_tokens and verdict.logged is not None:
            new = verdict.logged.messages[1:]
            prompt = usage.prompt_tokens + usage.completion_tokens + _tokens(new, self._gate)
            cached = usage.prompt_tokens
        return self._request(
            claim,
            StepHint(claim.run_id, claim.step + (verdict.logged is not None)),
            prompt,
            cached,
            verdict.state.messages,
        )

    def _request(
        self,
        claim: Claim,
        hint: StepHint | None = None,
        prompt: int | None = None,
        cached: int = 0,
        messages: Sequence[Message] | None = None,
    ) -> Request | None:
        """Return the request for a step's grant; None where no limit applies to it."""
        config, gate = claim.config, self._gate
        names = self._names(claim, config.model)
        if not names:
            return None
        if prompt is None:
            prompt = _tokens(claim.state.messages if messages is None else messages, gate)
        is_first = hint is None and claim.state.step_count == 0
        amounts = reserved(
            config.model,
            prompt=prompt,
            output=self._outputs.of(config.name),
            most=config.settings.max_tokens,
            cached=cached,
            first=is_first,
        )
        of = (hint or claim.hint, config.name, claim.tenant or "")
        return Request(*of, names, amounts, fresh=is_first)

    def _names(self, claim: Claim, model: str) -> tuple[str, ...]:
        return names_of(
            self._gate.limits,
            model=model,
            tenant=claim.tenant or "",
            batch=claim.batch_id or "",
            agent=claim.config.name,
        )

    # ------------------------------------------------------------------ settlement

    def _ending(self, claim: Claim, verdict: Verdict) -> list[Operation]:
        """Return what ends a step's grant."""
        if verdict.refused and verdict.move is Move.RETRY:
            model = claim.config.model
            is_limited = len(claim.config.models) == 1 and model in self._gate.limits
            pause = [throttling(model, verdict.retry_after)] if is_limited else []
            return [refunding(claim.hint), *pause]
        if claim.run_id not in self._gate.held:
            return []  # it is settled, or there was none
        if verdict.logged is None and verdict.move is Move.FINISH:
            return [refunding(claim.hint)]  # no call was made
        result = verdict.logged.result if verdict.logged else None
        usage = result.usage if result else None
        if usage is None:
            nothing = verdict.lost is not None and not verdict.lost.ambiguous
            nothing = nothing and not verdict.failed
            return [settling(claim.hint, Amounts() if nothing else None)]
        return self._settling(claim, usage, result.fallback if result else None)

    def _settling(
        self, claim: Claim, usage: UsageStats, fallback: Fallback | None
    ) -> list[Operation]:
        """Return what settles an answered call, under the model that has answered."""
        first, most = claim.config.model, claim.config.settings.max_tokens
        model = fallback.model if fallback else first
        taken = charged(model, usage, most=most, first=claim.state.step_count == 0)
        ended = settling(claim.hint, taken)
        if model == first:
            return [ended]
        own = self._names(claim, first)
        other = tuple(name for name in self._names(claim, model) if name not in own)
        return [ended, charging(other, taken)] if other else [ended]

    def _learn(self, claim: Claim, verdict: Verdict) -> None:
        result = verdict.logged.result if verdict.logged else None
        if result is not None and result.usage is not None and result.usage.completion_tokens:
            self._outputs.learn(claim.config.name, result.usage.completion_tokens)


def _tokens(messages: Sequence[Message], gate: Gate) -> int:
    """Return about how many tokens messages take; 0 where no limit counts them."""
    return total(map(estimate_tokens, messages)) if gate.counts_tokens else 0
