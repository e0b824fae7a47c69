"""A store of steps whose model calls keep the limits of the fleet.

A step without a grant is given back before its call: it holds no slot then, and no message. The
order of writes lets each crash heal: a step is due again after the grace time until it is in a
line; a grant that nobody renews is dispatched again, then taken back.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from stepfleet.orchestrator.errors import ModelError, RateLimitError, StoreError
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.limits.budgets import (
    HOLD,
    NOTHING,
    Exhausted,
    Spending,
    estimated,
    spending_of,
    spent_by,
)
from stepfleet.orchestrator.limits.estimates import (
    FIRST_OUTPUT,
    MOST_FIRST_OUTPUT,
    AgentEstimates,
    Amounts,
    charged,
    reserved,
    total,
)
from stepfleet.orchestrator.limits.limit import BATCH, RUN, exceeded, limit_of_run, names_of
from stepfleet.orchestrator.memory.pruning import estimate_tokens
from stepfleet.orchestrator.models.services import limit_name
from stepfleet.orchestrator.protocol.claim import Claim, Committed, Held, Refusal, Refused, Work
from stepfleet.orchestrator.protocol.lost_attempts import NO_ENTRIES, CallEntries
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.records.memory_window import Remembered, Summary
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.usage import UsageStats
from stepfleet.orchestrator.store.admission import (
    GRANTED,
    WAITS,
    Grant,
    GrantRequest,
    Operation,
    charging,
    losing,
    refunding,
    settling,
)
from stepfleet.orchestrator.store.limits import short_of
from stepfleet.orchestrator.store.runs.steps import StepStore
from stepfleet.worker.attempt.model_call import info_of
from stepfleet.worker.ports import StepContext
from stepfleet.worker.runtime.admission.gate import Gate, UsedGrant
from stepfleet.worker.runtime.admission.learning import Prompts
from stepfleet.worker.runtime.admission.spending import (
    Price,
    expected,
    spent_by_answer,
    spent_in,
    spent_in_vain,
)
from stepfleet.worker.step import CANCELLED, OF_VALUES

log = logging.getLogger(__name__)

FIRST_MILLISECONDS = 250
TOOL_SECONDS = 0.25
"""So long a call may stay in flight behind its answer; tools that take longer hold no limit."""
_RELEASED = partial(Verdict, Move.RELEASE)
LOOK_AGAIN_MS = "100"
NO_MODEL = "-"
"""What a step may call whose grant has ended."""
_OVER = frozenset(
    {Refused.UNKNOWN, Refused.ENDED, Refused.PAUSED, Refused.STALE, Refused.AHEAD, Refused.EARLY}
)
"""Refusals after which nobody will use the grant of that step."""


class AdmittedSteps:
    """Claims, journals and commits by `store`, with grants by `gate`; `price` is for budgets."""

    def __init__(self, store: StepStore, gate: Gate, price: Price) -> None:
        self._store = store
        self._gate = gate
        self._price = price
        self._outputs = AgentEstimates(FIRST_OUTPUT)
        self._durations = AgentEstimates(FIRST_MILLISECONDS)
        self._prompts = Prompts()

    async def claim(self, hint: Work, token: str) -> Claim | Refusal:
        """Take the step, if its limits have room or it needs none. Raises `StoreError`."""
        gate = self._gate
        reading = gate.calls.request_grant(hint.run_id) if gate.active else None
        claim = await self._store.claim(hint, token, waits=gate.may_hold(hint))
        try:
            return await self._with_grant(hint, claim, reading)
        except OF_VALUES as error:
            if isinstance(claim, Refusal) or isinstance(error, StoreError):
                raise
            return replace(claim, broken=info_of(error))

    async def _with_grant(
        self, hint: Work, claim: Claim | Refusal, reading: "asyncio.Future[Any] | None"
    ) -> Claim | Refusal:
        gate = self._gate
        if isinstance(claim, Claim) and claim.limited_by:
            own = f"{BATCH}:{claim.payer}" if claim.payer else f"{RUN}:{claim.run_id}"
            await gate.look_for(own)
        if not gate.active:
            return claim
        grant = Grant.loaded(await reading) if reading else None
        if isinstance(claim, Refusal):
            if grant is not None and grant.step == hint.step and claim.why in _OVER:
                await gate.call(await self._unused(hint, grant))
                await self._store.look_soon(hint.run_id)
            return claim
        if claim.journal.response is not None:
            return claim
        request, over = self._request(claim)
        if over is not None:
            return replace(claim, exhausted=over)
        return claim if request is None else await self._admitted(claim, request, grant)

    async def _unused(self, hint: Work, grant: Grant) -> Operation:
        """Return what ends the grant of a step that nobody may take.

        An answer was paid for; so were the calls of lost workers, perhaps.
        """
        is_answered, crashes = await self._store.known_of(hint)
        if is_answered:  # whoever has committed it may be about to settle it, or is lost
            return settling(hint, key=grant.key) | {"other": 1}
        if crashes > grant.crashes:
            return losing(hint, crashes)
        return refunding(hint, grant.key)

    async def _admitted(
        self, claim: Claim, request: GrantRequest, grant: Grant | None
    ) -> Claim | Refusal:
        gate, hint = self._gate, claim.hint
        if claim.losses.paid and gate.has_budgets:
            gate.end([losing(hint, claim.losses.paid)])  # in one call with what follows
        elif grant is not None and grant.step == hint.step and not grant.of:
            gate.use(request, claim.config.model, grant.key)
            return replace(claim, waited=grant.waited, waited_for=short_of(grant.why))
        try:
            word = await gate.call(request.operation("try"))
        except Exception as error:
            if isinstance(error, OF_VALUES) and not isinstance(error, StoreError):
                raise
            # Not to be taken for a lost worker: it is due again after the grace time.
            await self._store.commit(claim, _RELEASED(claim.state), Events([]), publish=False)
            raise
        if word == GRANTED:
            gate.use(request, claim.config.model)
            return claim
        if (over := Exhausted.loaded(word)) is not None:
            return replace(claim, exhausted=over)
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
        entries: CallEntries = NO_ENTRIES,
    ) -> Held:
        """Journal by the store. An answer ends the call, however long its tools take.

        What the ledger gets of failed calls is spent of budgets.
        """
        gate = self._gate
        used = gate.held.get(claim.run_id)
        held = await self._store.journal(
            claim,
            seconds,
            response=response,
            started=started,
            results=results,
            remembered=remembered,
            entries=entries,
        )
        if used is not None and held.ours:
            if response is not None:
                ends = self._answered(claim, used, response, remembered, entries)
                gate.end_later(claim.hint, TOOL_SECONDS, ends)
            if entries.failed and gate.has_budgets:
                spent = spent_in_vain(entries.failed, used.spending)
                gate.end([charging(used.names, None, spent)] if spent != NOTHING else [])
        return held

    async def note_call(self, claim: Claim, seconds: float, *, made: bool) -> Held:
        """Note by the store that a model call is made now, or none so far."""
        return await self._store.note_call(claim, seconds, made=made)

    async def _note_wait(self, step: StepContext) -> None:
        """Have the store know of a step that waits that no call of it was made so far."""
        calls, lease = step.calls, step.lease
        if not (calls.uncalled or calls.has_called):
            lease.apply(await self.note_call(step.claim, lease.seconds, made=False))
            calls.uncalled = True

    def _answered(
        self,
        claim: Claim,
        used: UsedGrant,
        response: LLMResponse,
        remembered: Remembered | None,
        entries: CallEntries,
    ) -> list[Operation]:
        """Return what settles a call whose answer is journaled."""
        made = 0 if response.cache is not None and response.cache.hit else 1
        usage = (response.usage or UsageStats()).model_copy(update={"llm_calls": made})
        paid = None
        if self._gate.has_budgets:
            memory = None if used.has_summary else response.remembered or remembered
            paid = spent_by_answer(entries.price, memory)
        return self._settling(claim, used, usage, paid)

    async def admit(self, step: StepContext, request: ModelRequest) -> None:
        """Have a step call a model under the limits of that one: a fallback, or for a summary.

        The grant for the model before ends. A model of which nothing is known is called in turn.
        Raises `ModelError` where there is no room.
        """
        gate, claim, calls, model = self._gate, step.claim, step.calls, request.model
        used = gate.held.get(claim.run_id)
        if model != (calls.admitted or claim.config.model) and (used or gate.active):
            calls.admitted = NO_MODEL
            used = await self._turn_to(model, step, used)
            calls.admitted = model
        limit = limit_name(model, request.settings)
        if not await gate.may_call(limit, partial(self._note_wait, step)):
            raise _held_back(model, limit)
        if used is not None:
            used.is_called = True

    async def _turn_to(
        self, model: str, step: StepContext, used: UsedGrant | None
    ) -> UsedGrant | None:
        """End the grant that is used, and return one for a call of `model`; None without limits."""
        gate, claim = self._gate, step.claim
        request, over = self._request(claim, model=model)
        if used is not None and request is not None and request.names == used.names:
            used.model = model
            return used
        summary = _summary_in(step)
        ended = [] if used is None else [self._turned(claim, used, summary)]
        gate.forget(claim.hint)
        if request is None:
            gate.end(ended)
            if over is None:
                return None
            raise _no_room(model, over, claim)
        word = await gate.call(request.after(ended[0]) if ended else request.operation("try"))
        if word != GRANTED:
            raise _no_room(model, Exhausted.loaded(word), claim)
        now = gate.use(request, model)
        now.has_summary = summary is not None
        return now

    def _turned(self, claim: Claim, used: UsedGrant, summary: Summary | None) -> Operation:
        """Return what settles a grant before another model is called.

        The ledger and budgets have calls that failed already; a summary is paid for here.
        """
        spent, most = NOTHING, claim.config.settings.max_tokens
        taken = None if used.is_called else Amounts(requests=0)
        if summary is not None and not used.has_summary:
            spent = spending_of(summary.usage, summary.cost_usd)
            taken = charged(used.model, summary.usage, most=most)
        paid = spent if self._gate.has_budgets else None
        return settling(claim.hint, taken, paid, used.names, used.key)

    async def commit(self, claim: Claim, verdict: Verdict, events: Events) -> Committed:
        """Commit by the store; settle the call, and request the grant of the next one."""
        gate = self._gate
        waits_together = bool(verdict.refused) and await gate.pauses(verdict.refused)
        first = limit_name(claim.config.model, claim.config.settings)
        if verdict.unsent and verdict.refused == first:
            return await self._held_back(claim, verdict)
        if not gate.active and claim.run_id not in gate.held:
            return await self._store.commit(claim, verdict, events)
        waits_alone = verdict.refused and not waits_together
        following = None if waits_alone else self._expected(claim, verdict)
        again = following is not None and waits_together
        if again:
            verdict = replace(verdict, delay=0.0)
        publish = following is None
        done = await self._store.commit(claim, verdict, events, publish=publish)
        if not done.applied:
            if not done.wanted:  # whoever has the step now has charged this call
                gate.forget(claim.hint)
            return done
        if verdict.move is Move.RELEASE:
            gate.end(self._released(claim, verdict))
            gate.forget(claim.hint)
            return done
        gate.end(self._ended(claim, verdict))
        gate.forget(claim.hint)
        if following is not None and done.status == "in_progress":
            await self._wait(following, "again" if again else "ask")
        return done

    # ------------------------------------------------------------------ grants

    async def _put_back(self, claim: Claim, request: GrantRequest) -> Claim | Refusal:
        """Release a step without a grant, and have it wait. A cancelled one goes on, to its end."""
        released = _RELEASED(claim.state)
        if claim.unpriced and self._gate.counts_tokens:
            released = replace(released, guess=expected(claim.config, request.amounts, self._price))
        done = await self._store.commit(claim, released, Events([]), publish=False)
        if done.wanted:
            state = claim.state.model_copy(update={"stop_requested": CANCELLED})
            return replace(claim, state=state)
        self._gate.crash("step-put-back")
        if done.applied and done.status == "in_progress":
            await self._wait(request, "again" if claim.limited else "ask")
        return Refusal(Refused.LIMITED, LOOK_AGAIN_MS)

    async def _held_back(self, claim: Claim, verdict: Verdict) -> Committed:
        """Release a step whose call was not sent, and have it wait."""
        for model in claim.config.models:  # until the limit is known that its refusal has made
            await self._gate.pauses(limit_name(model, claim.config.settings))
        released = replace(
            _RELEASED(claim.state),
            failed=verdict.failed,
            entered=verdict.entered,
            guess=verdict.guess,
        )
        done = await self._store.commit(claim, released, Events([]), publish=False)
        if done.applied and (used := self._gate.held.get(claim.run_id)) is not None:
            spent = spent_in(claim, verdict, used.spending) if self._gate.has_budgets else None
            unsent = Amounts(requests=0)
            self._gate.end([settling(claim.hint, unsent, spent, used.names, used.key)])
            self._gate.forget(claim.hint)
        request, _ = self._request(claim)
        if request is not None and done.applied and done.status == "in_progress":
            await self._wait(request, "ask")
        return done

    async def _wait(self, request: GrantRequest, op: str) -> None:
        """Request a grant for a step that nobody holds: it is dispatched with it, now or later."""
        if await self._gate.call(request.operation(op)) == WAITS:
            self._gate.crash("limits-requested")
            await self._store.shelve(request.hint, request.names[0], self._gate.look_seconds)

    def _expected(self, claim: Claim, verdict: Verdict) -> GrantRequest | None:
        """Return the request of the following step, which is expected to take as much as this.

        Whatever goes wrong with it, the step is committed: the next one asks for itself.
        """
        try:
            self._learn(claim, verdict)
            return self._following(claim, verdict)
        except OF_VALUES:
            log.exception("the next step of run %s asks for itself", claim.run_id)
            return None

    def _ended(self, claim: Claim, verdict: Verdict) -> list[Operation]:
        """Return what ends a committed step's grant; as it was reserved where that fails."""
        try:
            return self._ending(claim, verdict)
        except OF_VALUES:
            log.exception("a call of run %s is charged as it was expected", claim.run_id)
            return [settling(claim.hint)]

    def _following(self, claim: Claim, verdict: Verdict) -> GrantRequest | None:
        """Return the request of the step after that verdict; None where none follows at once."""
        if verdict.refused:
            request, _ = self._request(claim)
            is_limited = request is not None and request.names[0] == verdict.refused
            return request if is_limited else None
        if verdict.move is not Move.CONTINUE or verdict.delay:
            return None
        if verdict.logged and verdict.logged.handoff:  # of another agent: it requests its own
            return None
        result = verdict.logged.result if verdict.logged else None
        usage = result.usage if result else None
        prompt, cached = None, 0
        if usage is not None and usage.total_tokens and verdict.logged is not None:
            new = verdict.logged.messages[1:]
            prompt = usage.prompt_tokens + usage.completion_tokens + _tokens(new, self._gate)
            cached = usage.prompt_tokens
        hint = Work(claim.run_id, claim.step + (verdict.logged is not None))
        request, over = self._request(claim, hint, prompt, cached, verdict.state)
        return None if over else request

    def _request(
        self,
        claim: Claim,
        hint: Work | None = None,
        prompt: int | None = None,
        cached: int = 0,
        state: AgentState | None = None,
        model: str = "",
    ) -> tuple[GrantRequest | None, Exhausted | None]:
        """Return the request for a step's grant, None where no limit applies to it.

        And the budget of the run that ends it, if there is one. `model` is that of the agent's
        further calls.
        """
        config, gate = claim.config, self._gate
        of = "" if model == config.model else model
        model = model or config.model
        names = self._names(claim, model)
        own = limit_of_run(gate.limits, claim.run_id) if gate.has_runs else None
        if not names and own is None:
            return None, None
        state = state or claim.state
        whole = prompt is None
        counted = _tokens(state.messages, gate) if prompt is None else prompt
        prompt = self._prompts.expect(config.name, hint or claim.hint, counted, whole=whole)
        is_first = hint is None and claim.state.step_count == 0
        amounts = reserved(
            model,
            prompt=prompt,
            output=self._outputs.of(config.name),
            most=config.settings.max_tokens,
            cached=cached,
            first=is_first,
        )
        if gate.has_budgets:
            output = self._outputs.of(config.name)
            amounts = replace(amounts, spending=self._estimated(claim, model, prompt, output))
            if not self._outputs.knows(config.name):
                most = config.settings.max_tokens or MOST_FIRST_OUTPUT
                amounts = replace(amounts, most=self._estimated(claim, model, prompt, most))
        if own is not None and amounts.spending is not None:
            before, name = spent_by(state), f"{RUN}:{claim.run_id}"
            if (over := exceeded(own, name, before, amounts.spending)) is not None:
                if own.on_budget != HOLD:
                    return None, over
                names = (*(names or (f"{RUN}:*",)), name)
                amounts = replace(amounts, before=before)
        if not names:
            return None, None
        whose = (hint or claim.hint, config.name, claim.tenant or "")
        is_new = claim.losses.new and not claim.losses.uncalled
        crashes, lost = (0, False) if hint else (claim.losses.paid, is_new and not of)
        return GrantRequest(
            *whose, names, amounts, is_first, crashes, lost, claim.priority, of
        ), None

    def _estimated(self, claim: Claim, model: str, prompt: int, output: int) -> Spending:
        """Return what a call of so large a prompt and so large an answer spends."""
        config = claim.config
        if (most := config.settings.max_tokens) is not None:
            output = min(output, most)
        usage = UsageStats(prompt_tokens=prompt, completion_tokens=output)
        usd = self._price(config, model, usage)
        return estimated(prompt, output, usd, self._durations.of(config.name) / 1000)

    def _names(self, claim: Claim, model: str) -> tuple[str, ...]:
        return names_of(
            self._gate.limits,
            model=limit_name(model, claim.config.settings),
            tenant=claim.tenant or "",
            batch=claim.payer,
            agent=claim.config.name,
        )

    # ------------------------------------------------------------------ settlement

    def _released(self, claim: Claim, verdict: Verdict) -> list[Operation]:
        """Return what a released step has spent: whoever takes it over uses its grant.

        Unless that is for another model than the first, which will be called.
        """
        gate = self._gate
        if (used := gate.held.get(claim.run_id)) is None:
            return []
        spent = spent_in(claim, verdict, used.spending) if gate.has_budgets else None
        if used.model != claim.config.model:
            return [settling(claim.hint, None, spent, used.names, used.key)]
        return [charging(used.names, None, spent)] if spent not in (None, NOTHING) else []

    def _ending(self, claim: Claim, verdict: Verdict) -> list[Operation]:
        """Return what ends a step's grant."""
        gate, hint = self._gate, claim.hint
        used = gate.held.get(claim.run_id)
        result = verdict.logged.result if verdict.logged else None
        spent = None
        if gate.has_budgets:
            has_summary = used is not None and used.has_summary
            reserved = used.spending if used else NOTHING
            spent = spent_in(claim, verdict, reserved, has_summary=has_summary)
            spent = replace(spent, active_ms=round(result.duration_ms) if result else 0)
        if used is None:
            return self._late(claim, verdict, spent)  # it is settled, or there was none
        if verdict.refused:  # its request is not given back: the provider has counted it
            return [settling(hint, Amounts(), spent, used.names, used.key)]
        if verdict.logged is None and verdict.move is Move.FINISH and verdict.lost is None:
            return [refunding(hint, used.key)]  # no call was made
        if verdict.move is Move.WAIT and used.ends:  # for its tools; the answer is journaled
            return list(used.ends)
        usage = result.usage if result else None
        if usage is None:
            nothing = verdict.lost is not None and not verdict.lost.ambiguous
            taken = Amounts() if nothing and not verdict.failed else None
            return [settling(hint, taken, spent, used.names, used.key)]
        if used.has_summary and verdict.logged and (made := verdict.logged.remembered):
            usage = usage - made.summary.usage if made.summary else usage
        return self._settling(claim, used, usage, spent)

    def _late(self, claim: Claim, verdict: Verdict, spent: Spending | None) -> list[Operation]:
        """Return what is charged behind the settlement, or ends the grant of another's answer."""
        is_answered = claim.journal.response is not None  # its worker may be lost
        if verdict.logged is None:
            if verdict.move is not Move.FINISH:
                return []
            return [settling(claim.hint) if is_answered else refunding(claim.hint)]
        operations = []
        if spent is not None and self._gate.has_times:
            time = replace(NOTHING, active_ms=spent.active_ms)
            fallback = verdict.logged.result.fallback
            model = fallback.model if fallback else claim.config.model
            operations.append(charging(self._names(claim, model), None, time))
        if is_answered:
            paid = None if spent is None else replace(spent, active_ms=0)
            operations.append(settling(claim.hint, None, paid))
        return operations

    def _settling(
        self, claim: Claim, used: UsedGrant, usage: UsageStats, spent: Spending | None
    ) -> list[Operation]:
        """Return what settles an answered call, under the model that has answered."""
        most, is_first = claim.config.settings.max_tokens, claim.state.step_count == 0
        taken = charged(used.model, usage, most=most, first=is_first)
        return [settling(claim.hint, taken, spent, used.names, used.key)]

    def _learn(self, claim: Claim, verdict: Verdict) -> None:
        result = verdict.logged.result if verdict.logged else None
        if result is not None and result.usage is not None and result.usage.completion_tokens:
            self._outputs.learn(claim.config.name, result.usage.completion_tokens)
            if self._gate.estimates_tokens and result.usage.llm_calls == 1:
                self._prompts.learn(claim.config.name, claim.hint, result.usage.prompt_tokens)
        if result is not None and self._gate.has_times:
            self._durations.learn(claim.config.name, round(result.duration_ms))


def _summary_in(step: StepContext) -> Summary | None:
    """Return the summary that this attempt has made."""
    remembered = step.calls.remembered
    is_new = remembered is not None and step.claim.journal.remembered is None
    return remembered.summary if remembered and is_new else None


def _held_back(model: str, limit: str) -> RateLimitError:
    error = RateLimitError(f"{model} has just refused other calls; this one was not sent")
    error.model, error.limit, error.unsent = model, limit, True
    return error


def _no_room(model: str, over: Exhausted | None, claim: Claim) -> ModelError:
    """Return the error of a call that a model's own limits keep from being made.

    A spent budget is passed over for the agent's next model; otherwise the step waits.
    """
    if over is not None and model != claim.config.model:
        reason = over.evaluation().reason
        spent = ModelError(f"{model} was not called: {reason}", code=ModelErrorCode.QUOTA_EXHAUSTED)
        spent.model, spent.unsent = model, True
        return spent
    full = RateLimitError(f"{model} was not called: its limits have no room for now")
    full.model, full.unsent = model, True
    full.limit = limit_name(model, claim.config.settings)
    return full


def _tokens(messages: Sequence[Message], gate: Gate) -> int:
    """Return about how many tokens messages take; 0 where no limit counts them."""
    return total(map(estimate_tokens, messages)) if gate.estimates_tokens else 0
