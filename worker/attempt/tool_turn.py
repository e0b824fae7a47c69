"""The tools of one step: journaled before and after, in order or at once, never twice.

Decides which calls still have to run; running one is the toolbox's business.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from stepfleet.orchestrator.agents.reasoner import ModelTurn, Reasoner, joined
from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.protocol.attempt import (
    Answered,
    Interrupted,
    Interruption,
    Parked,
    Wait,
    not_run,
    waited_in_vain,
)
from stepfleet.orchestrator.protocol.claim import Want
from stepfleet.orchestrator.protocol.lost_attempts import NO_ENTRIES
from stepfleet.orchestrator.protocol.revision import (
    Transfer,
    handed_over,
    price_of,
    too_late,
    transfer_in,
)
from stepfleet.orchestrator.protocol.waiting import answered, divided, patience, wait_key
from stepfleet.orchestrator.records.calls.answers import Awaited, RunEnd, awaited_by
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord, refused
from stepfleet.orchestrator.records.ledger import bare_name
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.run.results import LostAttempt
from stepfleet.orchestrator.records.steps import FinishReason, Progress
from stepfleet.orchestrator.tools import ToolInvocation
from stepfleet.orchestrator.tools.schemas.time_limit import run_check
from stepfleet.worker.attempt.made_calls import entries_with, is_journaled
from stepfleet.worker.attempt.model_call import info_of
from stepfleet.worker.attempt.usage import call_cost
from stepfleet.worker.ports import AgentCode, StepContext
from stepfleet.worker.toolbox.execution import execute_at_once
from stepfleet.worker.toolbox.failure_log import log_failure


@dataclass
class ToolTurn:
    """Runs the calls of one response and keeps the record of each."""

    step: StepContext
    agent: AgentCode
    response: LLMResponse
    reasoner: Reasoner | None = None
    records: dict[int, ToolCallRecord] = field(init=False)

    def __post_init__(self) -> None:
        self.claim, self.lease, self.ports = self.step.claim, self.step.lease, self.step.ports
        self.calls = self.response.tool_calls or ()
        self.records = {**self._answered(), **self.claim.journal.results}
        self._journaled = set(self.claim.journal.results)
        self._response_known = self.claim.journal.response is not None
        self._noted = False
        self._handled: frozenset[int] = frozenset()
        self._progress: Progress | None = None
        self._stopped: dict[int, RunEnd | None] = {}
        self._pauses = False
        self._announce = self.agent.starts_for(self.claim) if self.calls else None
        if self.response.finish_reason is FinishReason.PAUSE:
            self.reasoner = None  # half a turn: there is nothing to judge yet
        if self.reasoner and (handling := self.reasoner.handle(self.response, self.claim.state)):
            for one in handling.records.values():
                if one.error and one.error.traceback:
                    log_failure(f"tool {one.tool_name!r}", one.error.message, one.error.traceback)
            self.records = {**handling.records, **self.records}
            self._handled = frozenset(handling.records)
            self._progress = handling.progress
        self._transfer: Transfer | None = None
        if self.agent.handoffs and (found := transfer_in(self.calls, self.agent.handoffs)):
            self._transfer = found
            for index in found.others:
                late = too_late(self.calls[index], found.to, self.lease.now)
                self.records.setdefault(index, late)

    async def run(self) -> Answered | Parked:
        """Run every call that has no result yet. Raises `asyncio.CancelledError` alone.

        For calls with a queue of their own the step waits. Where a pause arrives, no further call
        starts: the step waits for nothing, and goes on from its journal when it is resumed.
        """
        open_calls, waits = await self._open_calls()
        if self._over_at_once(open_calls):
            for index in open_calls:
                await self._run(index)
                if index != open_calls[-1]:
                    await asyncio.sleep(0)  # others have their turn
        elif open_calls:
            async with self.ports.pacing.elsewhere:
                await self._run_noted(open_calls)
        if self._pauses:
            return await self._parked(())
        if waits:
            return await self._parked(waits)
        self.ports.crash("after-tools")
        if self.reasoner:
            self._progress = joined(self._progress, await self._read(self.reasoner))
            said, use = self._progress, self.response.cache
            if use and said and (said.error or said.refused):
                self.agent.forget_answer(use.key)
        return self._result()

    async def _open_calls(self) -> tuple[list[int], tuple[Wait, ...]]:
        """Return the calls to be made now, and those to wait for."""
        if self._transfer is not None:
            await self._find_successor(self._transfer)
        open_calls = [index for index in range(len(self.calls)) if index not in self.records]
        tools = self.agent.tools
        if not tools.queues and not tools.approvals:
            return open_calls, ()
        self._stopped = await self._stop_overdue(open_calls)
        found = await asyncio.gather(*map(self._asks_people, open_calls))
        asks = [index for index, is_ask in zip(open_calls, found, strict=True) if is_ask]
        return self._divided(open_calls, asks)

    async def keep(self) -> None:
        """Journal the response and the records for the worker that continues this step."""
        if not self._response_known or self.records.keys() - self._journaled:
            await self._note()

    def interrupted(self, by: Interruption) -> Interrupted:
        """Return an interrupted attempt."""
        return Interrupted(self.step.span, by, self._not_run(by))

    def _not_run(self, by: Interruption) -> Answered:
        """Return the result with records for calls that have none, which say why."""
        for index, call in enumerate(self.calls):
            if index not in self.records:
                self.records[index] = not_run(call, by, self.lease.now)
        return self._result()

    def _divided(
        self, open_calls: list[int], asks: Sequence[int]
    ) -> tuple[list[int], tuple[Wait, ...]]:
        tools, calls = self.agent.tools, self.calls
        places: dict[int, str] = {
            index: queue
            for index, call in enumerate(calls)
            if (queue := tools.queues.get(call.name)) and queue != Awaited.PERSON
        }
        limits: dict[int, float | None] = {}
        for index in asks:
            options = tools.get(calls[index].name).options
            is_question = options.queue == Awaited.PERSON
            places[index] = Awaited.PERSON if is_question else Awaited.APPROVAL
            limits[index] = options.approval_timeout
        self._give_up(self.claim.overdue.intersection(open_calls), places)
        parallel = self.claim.config.parallel_tool_execution
        while True:
            left = [index for index in open_calls if index not in self.records]
            now, waits = divided(left, calls, places, parallel=parallel)
            if not waits or patience(self.claim.config, self.claim.state, self.lease.now) > 0:
                break
            # Approved at the last moment, perhaps: nobody would learn what has come of it.
            self._give_up((one.index for one in waits), places)
        return now, tuple(
            replace(one, key=self._key(one), within=limits.get(one.index)) for one in waits
        )

    def _give_up(self, indexes: Iterable[int], places: Mapping[int, str]) -> None:
        """Record calls without a result by the end of the run's time."""
        for index in indexes:
            late = waited_in_vain(self.calls[index], self.lease.now, places.get(index, ""))
            self.records[index] = late.model_copy(update={"run": self._stopped.get(index)})

    async def _stop_overdue(self, open_calls: Iterable[int]) -> dict[int, RunEnd | None]:
        """Cancel the runs of calls that are waited for no longer, and return these."""
        claim, queues, stop = self.claim, self.agent.tools.queues, self.ports.stop_run
        return {
            index: await stop(self._key_of(index), claim.run_id)
            for index in claim.overdue.intersection(open_calls)
            if queues.get(self.calls[index].name) == Awaited.RUN
        }

    async def _asks_people(self, index: int) -> bool:
        """Return whether a call waits for a person: one that can be made, and has no decision."""
        call, tools = self.calls[index], self.agent.tools
        is_question = tools.queues.get(call.name) == Awaited.PERSON
        if call.error is not None or not (is_question or call.name in tools.approvals):
            return False
        if index in self.claim.journal.answers:
            return False
        if index in self.claim.overdue:
            return True  # it has waited in vain
        tool = tools.get(call.name)
        try:
            await run_check(tool.check, call.arguments)
        except Exception:  # noqa: BLE001 - the call is answered with what its check says
            return False
        if is_question or not callable(tool.options.approval):
            return True
        return await self.ports.toolbox.needs_approval(
            call, tool, self._invocation(index, call), clock=lambda: self.lease.now
        )

    def _key(self, wait: Wait) -> str:
        return "" if awaited_by(wait.queue) is None else self._key_of(wait.index)

    def _key_of(self, index: int) -> str:
        claim = self.claim
        return wait_key(claim.run_id, claim.step, index, self.calls[index])

    def _answered(self) -> dict[int, ToolCallRecord]:
        """Return the records of calls that have their answer from another run, or a person."""
        found = {
            index: answered(self.calls[index], answer, self.lease.now)
            for index, answer in self.claim.journal.answers.items()
        }
        return {index: record for index, record in found.items() if record is not None}

    async def _find_successor(self, transfer: Transfer) -> None:
        try:
            target = await self.ports.successor(transfer.to)
        except ConfigurationError as error:
            record = refused(
                self.calls[transfer.index],
                self.lease.now,
                code="UNKNOWN_AGENT",
                message=f"not handed over: {error.message}",
            )
            self.records[transfer.index] = record
        else:
            self._transfer = replace(transfer, target=target)

    async def _parked(self, waits: tuple[Wait, ...]) -> Parked:
        await self.keep()
        return Parked(self.step.span, waits, self._not_run(Interruption.CANCELLED))

    async def _read(self, reasoner: Reasoner) -> Progress | None:
        """Return the reasoner's reading; its failure is an error of the step, never lost work.

        The response and the tools' results are stored in either case.
        """
        records = self._ordered()
        turn = ModelTurn(self.response, records, self._texts(records))
        try:
            return await reasoner.read(turn, self.claim.state)
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - users write reasoners; none may lose a step
            failed = info_of(error)
            log_failure("a step", failed.message, failed.traceback, error)
            return Progress(error=failed)

    def _over_at_once(self, open_calls: list[int]) -> bool:
        """Return whether a journal entry would cost more than it saves.

        A step that has lost a worker is journaled: whatever ended it may be a tool.
        """
        tools = self.agent.tools
        if self.claim.crashes or not tools.instant or tools.middleware or tools.late:
            return False
        return all(self.calls[index].name in tools.instant for index in open_calls)

    async def _run_noted(self, open_calls: list[int]) -> None:
        if self.claim.config.parallel_tool_execution and len(open_calls) > 1:
            await self._note(started=tuple(open_calls))
            if not self._pauses:
                await execute_at_once(open_calls, self._run_beside_others)
            return
        for index in open_calls:
            await self._note(started=(index,))
            if self._pauses:
                return
            await self._run(index)

    async def _run_beside_others(self, index: int) -> None:
        await self._run(index)
        if len(self.records) < len(self.calls):
            await self._note()

    async def _run(self, index: int) -> None:
        call, ports = self.calls[index], self.ports
        ports.crash("tool-started")
        ports.crash("during-tool")
        if self._announce is not None:
            self._announce(call, self.lease.now)
        before = index in self.claim.journal.started
        invocation = self._invocation(index, call, 2 if before else 1)
        self.records[index] = await ports.toolbox.attempt(
            call, self.agent.tools, invocation, clock=lambda: self.lease.now
        )
        ports.crash("after-tool")

    def _invocation(self, index: int, call: ToolCall, attempt: int = 1) -> ToolInvocation:
        return ToolInvocation.of(
            call,
            run_id=self.claim.run_id,
            execution=self.claim.state.info.execution,
            step=self.claim.number,
            index=index,
            attempt=attempt,
            custom_state=self.claim.state.custom_state,
        ).within(self.claim.state.metadata, self.claim.batch_id, self.claim.line_id)

    async def _note(self, started: tuple[int, ...] = ()) -> None:
        """Journal results that are new, and starts: a result travels with the next start."""
        results = {i: self.records[i] for i in self.records if i not in self._journaled}
        self.ports.crash("before-journal")
        is_new = not self._response_known
        entries = NO_ENTRIES
        if is_new:
            entries = entries_with(self.step, self.response, self._price())
        held = await self.ports.store.journal(
            self.claim,
            self.lease.seconds,
            response=self.response if is_new else None,
            started=started,
            results=results,
            entries=entries,
        )
        if is_new and held.ours:
            is_journaled(self.step, self.response, entries)
        self._noted |= is_new and held.ours
        self._response_known = True
        self._journaled |= set(results)
        self.ports.crash("after-journal")
        self.lease.apply(held)
        self._pauses = bool(started) and held.ours and held.want == Want.PAUSE
        if self.lease.interruption:
            await asyncio.sleep(0)

    def _ordered(self) -> tuple[ToolCallRecord, ...]:
        answers = self.claim.journal.answers
        return tuple(
            record.model_copy(update={"decision": answer.decision})
            if (answer := answers.get(index)) and answer.decision
            else record
            for index, record in sorted(self.records.items())
        )

    def _texts(self, records: Iterable[ToolCallRecord]) -> tuple[str, ...]:
        return tuple(map(self.ports.toolbox.text, records))

    @cached_property
    def _cost(self) -> float:
        config = self.claim.config
        fallback = self.response.fallback
        model = fallback.model if fallback else config.model
        return call_cost(self.response, model, config, self.ports)

    def _price(self) -> LostAttempt | None:
        response = self.response
        if response.cache is not None and response.cache.hit:
            return None
        model = response.model or bare_name(self.claim.config.model)
        cost, tier = self._cost, response.service_tier
        return price_of(self.claim.number, response.usage, cost, model, tier)

    def _result(self) -> Answered:
        at, records = self._transfer, self._ordered()
        return Answered(
            self.step.span,
            self.response,
            records,
            self._texts(records),
            self._cost,
            self._progress,
            self._handled,
            self._noted,
            handed_over(self.claim, at, self.records.get(at.index) if at else None),
        )
