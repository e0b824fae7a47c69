"""Claim, journal, commit: the scripts of a step, bound to records; deaths of its processes."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.limits.limit import NORMAL
from stepfleet.orchestrator.protocol.claim import (
    Claim,
    Committed,
    Held,
    How,
    Refusal,
    Refused,
    Want,
    Work,
    losses,
    unpaid_of,
)
from stepfleet.orchestrator.protocol.guards import cancelled_outcome
from stepfleet.orchestrator.protocol.lost_attempts import NO_ENTRIES, CallEntries
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.orchestrator.protocol.waiting import NOTHING
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.memory_window import Remembered
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.run.results import end_state
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.records.steps import SHORTENED, LoggedStep
from stepfleet.orchestrator.records.usage import nano_usd
from stepfleet.orchestrator.store.codec import (
    Fields,
    duration,
    load_history,
    load_journal,
    load_messages,
    load_state,
    load_wait,
    log_begin,
    log_end,
    moment,
    pairs,
    slim,
    stored_agent,
    stored_events,
    stored_guesses,
    stored_loss,
    stored_losses,
    stored_model,
    stored_outage,
    stored_outcome,
    stored_step,
    writing,
)
from stepfleet.orchestrator.store.gateway import Gateway, Opened
from stepfleet.orchestrator.store.ledger import Payer, default_priced, lines_of
from stepfleet.orchestrator.store.lua import RunScripts, detail_of, load
from stepfleet.orchestrator.store.runs.step_reader import StepReader
from stepfleet.orchestrator.store.runs.tool_calls import ToolCalls
from stepfleet.orchestrator.version import own_build

_COMPLETE = 6
"""Parts of a claim's reply that is complete; a longer one lacks pages of the log or the journal."""
_MOST_NAMES = 1000
"""Fields of the journal that one call reads."""
OWED, LAST = "owed", "last"
LOST_WHILE_READ = "the step was taken over while its log was read"
MOST_DOUBLINGS = 3
"""Newer workers must not wait for minutes for a run that older ones refused."""
UNREAD_TEXT = 300
"""Characters of why a run could not be read that its wait keeps."""


_HEADER = (
    *("status", "step", "want", "batch", "wait", "v", "since", "created", "config"),
    *("execution_started", "overrides", "slim", "line", "attempt", "limited", "crashes"),
    *("losses", "outcome", "want_note", "tenant", "unpriced", "vain", "vain_before"),
    *("priority", "limited_by", "billed", "uncalled", "unpaid"),
)
"""The fields of a run's header that a claim returns, in the order of claim.lua."""


class StepStore(Gateway):
    """The store for the steps of a worker. `lease` and `grace` are seconds."""

    def __init__(self, opened: Opened, calls: ToolCalls) -> None:
        super().__init__(opened)
        self.lease, self.grace = opened.settings.lease, opened.settings.grace
        self.worker = opened.worker
        self.calls = calls
        self.reader = StepReader()
        self.has_price: Callable[[AgentConfig, str], bool] = lambda _, __: True

    async def prepare(self) -> None:
        """Have Redis know the scripts."""
        await load(self._connection)

    async def claim(self, hint: Work, token: str, *, waits: bool = False) -> Claim | Refusal:
        """Take the step: fence, lease, load, in one round trip; a long log takes more.

        With `waits` its model call may have to wait: the store knows that none is made before
        `note_call`.

        Raises `StoreError` when Redis stays out of reach or the records cannot be read.
        """
        owned = (hint.step, token, duration(self.lease))
        given = (*owned, self.worker, "1" if waits else "")
        reply = await self._pushing.run("claim", hint.run_id, *given)
        if reply[0] != "claimed":
            return Refusal(Refused(reply[0]), detail_of(reply), owes=reply[-1] == OWED)
        if len(reply) > _COMPLETE and not await _read_pages(
            self._scripts, (hint.run_id, *owned), reply
        ):
            return Refusal(Refused.STALE, LOST_WHILE_READ)
        read = zip(_HEADER, reply[2], strict=True)
        header = {name: value for name, value in read if value is not None}
        try:
            return await self._load(hint, token, moment(reply[1]), header, reply)
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the record, nobody was lost
            await self._give_back(hint, token, header, str(error))
            return Refusal(Refused.UNREADABLE, str(error))

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
        """Renew the lease and note work that must not be repeated. `seconds`: since the claim.

        `entries` are for the ledger: now, but for the price of the `response`.
        """
        fields: list[str] = []
        if entries.failed:
            fields += ["failed", stored_losses(entries.failed, entries.entered)]
        if response is not None:
            fields += ["response", response.to_json()]
        if entries.price is not None:
            fields += ["price", entries.price.to_json()]
        if remembered is not None:
            fields += ["memory", remembered.to_json()]
        for index in started:
            fields += [f"s:{index}", "1"]
        for index, record in (results or {}).items():
            fields += [f"r:{index}", record.to_json()]
        return await self._journaled("journal" if fields else "renew", claim, seconds, fields)

    async def note_call(self, claim: Claim, seconds: float, *, made: bool) -> Held:
        """Renew the lease and note that a model call is made now, or that none was made so far."""
        return await self._journaled("renew", claim, seconds, ("called", "1" if made else "0"))

    async def _journaled(
        self, script: str, claim: Claim, seconds: float, fields: Sequence[str]
    ) -> Held:
        times = (duration(self.lease), duration(seconds))
        reply = await self._scripts.run(
            script, claim.run_id, claim.step, claim.token, *times, *fields
        )
        return Held(ours=reply[0] == "held", want=detail_of(reply))

    async def commit(
        self, claim: Claim, verdict: Verdict, events: Events, *, publish: bool = True
    ) -> Committed:
        """Write a verdict, all or nothing, and make the next step due.

        Without `publish` the caller dispatches that, or the rescuer after the grace time. Raises
        `SerializationError` for a value that cannot be stored.
        """
        if verdict.waiting is not None:
            with writing:
                return _committed(await self.calls.park(claim, verdict, verdict.waiting, events))
        following = Work(claim.run_id, claim.step + (verdict.logged is not None))
        goes_on = verdict.move in (Move.CONTINUE, Move.RELEASE) and not verdict.delay and publish
        handoff = verdict.logged.handoff if verdict.logged else None
        agent = handoff.to.name if handoff else claim.config.name
        message = self._dispatch.message(following, agent) if goes_on else ""
        with writing:
            logged, ledger = self._entered(claim, verdict)
            fields = self._commit_fields(verdict, logged, events, message) | ledger
        if verdict.hold:
            fields["hold"] = verdict.hold
        if handoff:
            fields |= stored_agent(handoff.to)
            config = await self._configs.load(handoff.to.config)
            model = config.with_overrides(handoff.to.overrides).model
            fields["model"] = stored_model(handoff.to.config, model)
            if verdict.state.window is None:
                fields["since"] = ""
        if verdict.outage:
            fields["outage"] = stored_outage(verdict.outage)
        if verdict.state.window and claim.config.memory.trim_log:
            fields["trim"] = "1"
        reply = await self._pushing.run("commit", claim.run_id, claim.step, claim.token, **fields)
        if reply[0] in ("committed", "mine"):
            self._crash("end-applied" if verdict.move is Move.FINISH else "commit-applied")
            if verdict.move is Move.FINISH:
                self.reader.forget(claim.run_id)
            if goes_on and reply[1] == "in_progress":
                await self._dispatch.published(following, agent)
        return _committed(reply)

    async def known_of(self, hint: Work) -> tuple[bool, int]:
        """Return whether the model has answered in that step, and how many losses may be paid for.

        An answer is journaled, or committed; a loss is that of a worker.
        """
        key = self._scripts.keys.run(hint.run_id)
        (step, crashes, unpaid), has_answer = await self._connection.execute_all(
            ("HMGET", key, "step", "crashes", "unpaid"), ("HEXISTS", f"{key}:journal", "response")
        )
        is_open = step == str(hint.step)
        is_answered = int(step or 0) > hint.step or bool(is_open and has_answer)
        paid = int(crashes or 0) - unpaid_of(unpaid or "", hint.step)
        return is_answered, paid if is_open else 0

    async def shelve(self, hint: Work, limit: str, look: float) -> None:
        """Let a step wait for a limit of the fleet, unless its run has moved on.

        A rescuer looks after `look` seconds whether it is still in a line.
        """
        await self._scripts.run("shelve", hint.run_id, hint.step, limit, duration(look))

    async def look_soon(self, run_id: str) -> None:
        """Have a run that waits for a limit looked at after the grace time."""
        await self._scripts.run("shelve", run_id, "", "", duration(self.grace))

    def _commit_fields(
        self, verdict: Verdict, logged: LoggedStep | None, events: Events, message: str
    ) -> dict[str, Any]:
        result, state = logged.result if logged else None, verdict.state
        usage = result.usage if result else None
        fields: dict[str, Any] = {
            "verdict": verdict.move,
            "slim": slim(state, ended=verdict.move is Move.FINISH),
            "outcome": stored_outcome(verdict.outcome),
            "grace": duration(self.grace),
            "events": stored_events(events),
            "event_count": len(events),
        }
        optional = {
            "log": stored_step(logged) if logged else "",
            "want": Want.CANCEL if state.stop_requested else "",
            "delay": duration(verdict.delay),
            "message": message,
            "tokens": usage.total_tokens if usage else 0,
            "calls": usage.llm_calls if usage else 0,
            "cost": nano_usd(result.cost_usd) if result else 0,
            "attempt": int(verdict.attempt),
            "limited": int(verdict.limited),
            "lost": stored_loss(verdict.lost),
            "dropped": stored_loss(verdict.dropped),
        }
        fields |= {name: value for name, value in optional.items() if value}
        if state.window and (since := log_end(state.window)):
            fields["since"] = since
        if verdict.move is Move.FINISH:
            fields |= ending(verdict.stop_reason, verdict.error, self._settings.lifetime)
            is_completed = fields["status"] == Lifecycle.COMPLETED
            if is_completed and result and result.finish_reason in SHORTENED:
                fields["shortened"] = result.finish_reason
        if result and result.usage_estimated:
            fields["estimated"] = "1"
        return fields

    def _entered(self, claim: Claim, verdict: Verdict) -> tuple[LoggedStep | None, dict[str, Any]]:
        """Return the step with the models that no table has, and what the ledger gets."""
        fields: dict[str, Any] = {}
        config, logged = claim.config, verdict.logged
        if logged is not None:
            payer = Payer(claim.tenant or "", config.name, claim.payer, config.model)
            if models := default_priced(logged, payer, partial(self.has_price, config)):
                logged = logged.model_copy(update={"default_priced": models})
                fields["guessed"] = nano_usd(logged.result.cost_usd)
            if lines := lines_of(logged, payer):
                fields |= {"ledger": lines, "kept": self._settings.ledger_days}
        if verdict.failed:
            fields["failed"] = stored_losses(verdict.failed, verdict.entered)
        if verdict.guess:
            fields["guess"] = stored_guesses(verdict.guess)
        return logged, fields

    async def _load(
        self, hint: Work, token: str, now: datetime, header: Fields, reply: list[Any]
    ) -> Claim:
        await self._scripts.ensure_version(hint.run_id, header)
        config = await self._configs.of_run(header)
        fields = pairs(reply[3])
        first = log_begin(header) if header.get("since") else 0
        said, calls = self.reader.said(hint.run_id, fields, first)
        messages = load_messages(config.instructions, fields, said, first)
        state = load_state(header, messages, calls, now)
        history = None
        if config.memory.active or state.window:
            history = load_history(fields, said, config.instructions, state.window, first)
        wait = load_wait(header)
        return Claim(
            run_id=hint.run_id,
            step=hint.step,
            token=token,
            now=now,
            state=state,
            config=config,
            config_digest=header["config"],
            overrides=header.get("overrides", ""),
            journal=load_journal(pairs(reply[4])),
            attempts=int(header["attempt"]),
            limited=int(header["limited"]),
            losses=losses(
                int(header["crashes"]),
                header.get("losses", ""),
                hint.step,
                new=reply[5] != "",
                uncalled=reply[5] == "uncalled",
                unpaid=header.get("unpaid", ""),
            ),
            uncalled=header.get("uncalled") == token,
            decided=bool(header.get("outcome")),
            batch_id=header.get("batch") or None,
            line_id=header.get("line") or None,
            tenant=header.get("tenant"),
            priority=int(header.get("priority") or NORMAL),
            limited_by=header.get("limited_by") or "",
            billed=header.get("billed"),
            unpriced=len(header.get("unpriced", "").split()),
            overdue=frozenset(one.index for one in wait.calls) if wait else NOTHING,
            history=history,
            outage=wait.outage if wait else None,
        )

    async def _give_back(self, hint: Work, token: str, header: Fields, why: str) -> None:
        """Leave a run that this worker cannot read to others, at growing intervals; note `why`."""
        delay = self.grace * 2 ** min(int(header.get("limited", 0)), MOST_DOUBLINGS)
        fields = {
            "verdict": "retry",
            "slim": header.get("slim", ""),
            "outcome": header.get("outcome", ""),
            "want": header.get("want", ""),
            "delay": duration(delay),
            "grace": duration(self.grace),
            "limited": 1,
            "unread": f"stepfleet {own_build()}: {why}"[:UNREAD_TEXT],
        }
        if header.get("want") == Want.CANCEL:
            outcome = cancelled_outcome(header.get("want_note", ""))
            reason = StopReason.USER_REQUESTED
            fields |= {"verdict": "finish", "outcome": outcome.to_json()}
            fields |= ending(reason, None, self._settings.lifetime)
        reply = await self._pushing.run("commit", hint.run_id, hint.step, token, **fields)
        if reply[0] == "wanted":
            await self._give_back(hint, token, header | {"want": reply[1]}, why)


async def _read_pages(
    scripts: RunScripts, claim: tuple[str, int, str, int], reply: list[Any]
) -> bool:
    """Add the missing pages to a claim's `reply`; each page renews the lease.

    `claim`: run id, step, token and lease in ms. Returns False where the claim has lost the step
    meanwhile: then the pages may be of two logs. Raises as `Connection.execute` does.
    """
    _, _, _, log, journal, _, began, following, left = reply
    while following != "":
        page = await scripts.run("page", *claim, began, following)
        if page[0] != "page":
            return False
        log.extend(page[1])
        following = page[2]
    while left:
        names = left[:_MOST_NAMES]
        page = await scripts.run("page", *claim, began, "", *names)
        if page[0] != "page":
            return False
        journal.extend(page[3])
        left = left[page[4] :]
    return True


def ending(reason: StopReason | None, error: str | None, retention: int) -> dict[str, Any]:
    """Return the fields with which a script enters an end state."""
    if reason is None:
        msg = "a run cannot end without a stop reason"
        raise StoreError(msg)
    return {
        "status": end_state(reason),
        "stop_reason": reason,
        "error": error or "",
        "retention": retention,
    }


def _committed(reply: list[str]) -> Committed:
    if reply[0] == "wanted":
        return Committed(applied=False, wanted=reply[1])
    more = reply[3:]
    return Committed(
        applied=reply[0] != "lost", status=reply[1], owes=OWED in more, is_last=LAST in more
    )


class IsolationMarks(Gateway):
    """Notes the work that begins in isolated processes, and counts their deaths."""

    async def begin(self, hint: Work, token: str, group: int) -> bool:
        """Note that the owner of `token` begins, one of `group` in its process.

        Returns False, and notes nothing, where the work is somebody else's by now.
        """
        work = (hint.run_id, hint.step, token, "" if hint.index is None else hint.index)
        return bool(await self._scripts.run("tried", *work, group))

    async def died(self, hint: Work, token: str, group: int, agent: str) -> None:
        """Count the death of the process that had it, one of `group`, and dispatch it again.

        `agent` names the run's agent, for people.
        """
        step = hint.of_step
        is_step = hint.index is None
        message = self._dispatch.message(step, agent) if is_step else ""
        how = f"{How.ALONE}{group}"
        if await _died(self._pushing, hint, token, how, message=message) and is_step:
            await self._dispatch.published(step, agent)

    async def child_died(self, hint: Work, worker: str) -> bool:
        """Count the death of a pool's child, known as `worker`, if it had the work."""
        return await _died(self._scripts, hint, "", How.CHILD, worker=worker)

    async def worker_of(self, hint: Work) -> str:
        """Return the name of the worker that had the work last, or ''."""
        key, field = self._keys.run(hint.run_id), "worker"
        if hint.index is not None:
            key, field = f"{key}:journal", f"w:{hint.index}"
        return str(await self._connection.execute("HGET", key, field) or "")


async def _died(
    scripts: RunScripts,
    hint: Work,
    token: str,
    how: str,
    message: str = "",
    worker: str = "",
) -> bool:
    work = (hint.run_id, hint.step, token, "" if hint.index is None else hint.index)
    return bool(await scripts.run("died", *work, how, message, worker))
