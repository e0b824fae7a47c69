"""A chat window of an active run: event envelopes in, messages out. Keeps no clock.

Events may arrive twice, and text late: duplicates change nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from stepfleet.orchestrator.client.rendering.messages import (
    StatusType,
    UIContinuation,
    UIMessage,
    UIMetadata,
    UIRetry,
    UIRole,
    UIToolCall,
    answer_id,
    group_of,
    indicator,
    of_step,
    should_render_assistant_content,
    step_id,
    tool_id,
)
from stepfleet.orchestrator.events.envelope import EventType, StreamedText, args_summary
from stepfleet.orchestrator.records.state import TERMINAL, Lifecycle

Payload = Mapping[str, Any]


class LiveMessages:
    """The messages of one run, folded from its events and the chunks of its text.

    `shown` are messages in view already: a history, or the user's own. `attempts` is the
    agent's `model_attempts`, for the retry indicator. `continuation` shows the decision that ends
    the run, where its events include it (`include_continuation_trace`).
    """

    def __init__(
        self,
        run_id: str,
        *,
        shown: Iterable[UIMessage] = (),
        attempts: int | None = None,
        continuation: bool = False,
    ) -> None:
        self._run_id = run_id
        self._messages: dict[str, UIMessage] = {one.id: one for one in shown}
        self._attempts = attempts
        self._shows_continuation = continuation
        self._text = StreamedText()
        self._sequence = 0
        self._step = 0
        self._ended: datetime | None = None
        self._turn = 0  # the newest step of the turn before
        self._status: Lifecycle | None = None
        self._now: datetime | None = None

    @property
    def messages(self) -> tuple[UIMessage, ...]:
        """The messages in view, in order; the last one may be a status of the run's activity."""
        every = self._messages.values()
        working = {one.group for one in every if one.tool_call_id is not None}
        shown = tuple(one for one in every if self._is_shown(one, working))
        if self._status is not Lifecycle.IN_PROGRESS or self._text.is_open or self._now is None:
            return shown
        identity = f"{self._run_id}:thinking"
        return (*shown, status_message(identity, "Thinking...", self._now, StatusType.THINKING))

    @property
    def sequence(self) -> int:
        """The number of the newest event that was applied; 0 before the first."""
        return self._sequence

    @property
    def is_over(self) -> bool:
        """Whether the run has ended: then fetch its history and `reconcile`."""
        return self._status in TERMINAL

    def reconcile(self, history: Sequence[UIMessage]) -> tuple[UIMessage, ...]:
        """Replace the streamed messages by the stored history, and return the messages in view."""
        self._messages = {one.id: one for one in reconciled(self._messages.values(), history)}
        return self.messages

    def add(self, envelope: Mapping[str, Any]) -> bool:
        """Apply an envelope of any type; return whether there may be something new to show."""
        at = datetime.fromisoformat(envelope["timestamp"])
        if "sequence" not in envelope:
            return self._add_live(envelope, at)
        if envelope["sequence"] <= self._sequence:
            return False
        self._sequence, self._now = envelope["sequence"], at
        payload = envelope["payload"]
        match envelope["type"]:
            case EventType.STATUS:
                self._add_status(payload, at)
            case EventType.STEP_STARTED:
                self._begin(payload["step_number"])
            case EventType.STEP_RETRIED:
                self._put(retry_message(self._run_id, payload, at, self._attempts))
            case EventType.TOOL_STARTED:
                self._put(started_tool(self._run_id, self._step, payload, at))
            case EventType.TOOL_COMPLETED:
                known = self._messages.get(
                    tool_id(self._run_id, self._step, payload["tool_call_id"])
                )
                self._put(ended_tool(self._run_id, self._step, payload, at, known))
            case EventType.STEP_COMPLETED:
                self._complete(payload, at)
            case EventType.CONTINUATION:
                self._decide(payload, at)
            case _:
                return False
        return True

    def _decide(self, payload: Payload, at: datetime) -> None:
        if self._shows_continuation and not payload["should_continue"]:
            self._put(continuation_message(self._run_id, payload, at))

    def _add_live(self, envelope: Mapping[str, Any], at: datetime) -> bool:
        """Show text, or the start of a step or tool, before the commit; late starts are left."""
        if envelope["type"] == EventType.STREAM_CHUNK:
            return self._add_chunk(envelope, at)
        payload = envelope["payload"]
        step = payload["step_number"]
        if self._ended is not None and at <= self._ended:
            return False
        if envelope["type"] == EventType.STEP_STARTED:
            self._begin(step)
        elif envelope["type"] == EventType.TOOL_STARTED:
            self._step = step
            self._put(started_tool(self._run_id, step, payload, at))
        return True

    def _add_chunk(self, envelope: Mapping[str, Any], at: datetime) -> bool:
        if not self._text.add(envelope):
            return False
        step = envelope["payload"]["step_number"]
        known = self._messages.get(step_id(self._run_id, step))
        message = known or _text(step_id(self._run_id, step), step, "", at)
        self._put(message.model_copy(update={"content": self._text.of(step)}), ahead=True)
        return True

    def _begin(self, step: int) -> None:
        """Drop the messages of earlier attempts at a step."""
        self._step = step
        prefix = step_id(self._run_id, step)
        earlier = (f"{prefix}:error:", f"{prefix}:retry", f"{prefix}:tool:")
        kept = [one for one in self._messages.items() if not one[0].startswith(earlier)]
        self._messages = dict(kept)

    def _complete(self, payload: Payload, at: datetime) -> None:
        step, self._ended = payload["step_number"], at
        group = [one for one in self._messages.values() if one.group == group_of(step)]
        in_tools = {one.metadata.tool_error for one in group if one.metadata}
        if group:
            timing = {"step_duration_ms": payload["duration_ms"], "usage": payload["usage"]}
            known = group[0].metadata or UIMetadata()
            metadata = UIMetadata.model_validate({**known.model_dump(), **timing})
            self._put(group[0].model_copy(update={"metadata": metadata}))
        failed = [error for error in payload["errors"] if error not in in_tools]
        for number, error in enumerate(failed):
            identity = f"{step_id(self._run_id, step)}:error:{number}"
            self._put(status_message(identity, error, at, StatusType.ERROR, step=step))

    def _add_status(self, payload: Payload, at: datetime) -> None:
        if self.is_over:
            self._turn = self._step
        self._status = Lifecycle(payload["status"])
        identity = f"{self._run_id}:status"
        self._messages.pop(identity, None)
        if self._status in (Lifecycle.PAUSED, Lifecycle.CANCELLED, Lifecycle.STOPPED):
            text = self._status.value.capitalize()
            self._put(status_message(identity, text, at, StatusType.INFO))
        if not self.is_over:
            return
        if payload["last_response"] and self._status in (Lifecycle.COMPLETED, Lifecycle.STOPPED):
            self._answer(payload["last_response"], at)
        shown = {one.content for one in self._messages.values() if one.is_error}
        if payload["error_message"] and payload["error_message"] not in shown:
            identity = f"{self._run_id}:error:{self._sequence}"
            self._put(status_message(identity, payload["error_message"], at, StatusType.ERROR))

    def _answer(self, text: str, at: datetime) -> None:
        """Show the turn's last text, where no chunk has."""
        own = {group_of(step) for step in range(self._turn + 1, self._step + 1)}
        texts = (one for one in self._messages.values() if one.group in own)
        if not own or text in {one.content for one in texts if one.role is UIRole.ASSISTANT}:
            return
        calls = any(one.group == group_of(self._step) for one in self._messages.values())
        identity = (answer_id if calls else step_id)(self._run_id, self._step)
        self._put(_text(identity, self._step, text, at))

    def _is_shown(self, message: UIMessage, working: set[str | None]) -> bool:
        """Return whether a text is for people, now that its step calls tools or not."""
        step = message.metadata.step if message.metadata else None
        if step is None or message.id != step_id(self._run_id, step):
            return True
        calls = message.group in working
        return should_render_assistant_content(message.content, has_tool_calls=calls)

    def _put(self, message: UIMessage, *, ahead: bool = False) -> None:
        """Show a message in the place of the one with its id, else last, or `ahead` of its step."""
        if message.id in self._messages or not ahead:
            self._messages[message.id] = message
            return
        placed: dict[str, UIMessage] = {}
        for identity, one in self._messages.items():
            if message.id not in placed and one.group == message.group:
                placed[message.id] = message
            placed[identity] = one
        self._messages = {**placed, message.id: message}


def _text(identity: str, step: int, text: str, at: datetime) -> UIMessage:
    metadata = UIMetadata(**of_step(step))
    return UIMessage(
        id=identity, role=UIRole.ASSISTANT, content=text, timestamp=at, metadata=metadata
    )


def reconciled(shown: Iterable[UIMessage], history: Sequence[UIMessage]) -> tuple[UIMessage, ...]:
    """Return the history with the errors that were shown, each at its place.

    Stored messages replace streamed ones of the same id or tool call. Statuses that are no
    errors are dropped, and so are messages that the history does not have: it is the truth.
    """
    errors: dict[int, list[UIMessage]] = {}
    place = -1
    for message in shown:
        if not message.is_status:
            place = max(place, _place_of(message, history))
        elif message.is_error:
            errors.setdefault(place, []).append(message)
    merged = list(errors.get(-1, ()))
    for number, message in enumerate(history):
        merged += [message, *errors.get(number, ())]
    return tuple(merged)


def _place_of(message: UIMessage, history: Sequence[UIMessage]) -> int:
    """Return the place of the same message in the history; -1 where it has none."""
    for number, stored in enumerate(history):
        if stored.id == message.id:
            return number
    call = message.tool_call_id
    if call is None:
        return -1
    calls = [number for number, stored in enumerate(history) if stored.tool_call_id == call]
    return calls[-1] if calls else -1


def status_message(
    identity: str, text: str, at: datetime, kind: StatusType, **metadata: Any
) -> UIMessage:
    """Return a message of the fleet's own, of that kind."""
    about = UIMetadata(status_type=kind, **metadata)
    return UIMessage(id=identity, role=UIRole.STATUS, content=text, timestamp=at, metadata=about)


def started_tool(run_id: str, step: int, payload: Payload, at: datetime) -> UIMessage:
    """Return the status of a running tool; the tool's message replaces it, by its id."""
    args = payload.get("args")
    call = UIToolCall(
        id=payload["tool_call_id"],
        name=payload["tool_name"],
        args=args,
        args_summary=payload.get("args_summary", "") if args is None else args_summary(args),
    )
    return status_message(
        tool_id(run_id, step, payload["tool_call_id"]),
        indicator([call]),
        at,
        StatusType.TOOL_CALL,
        tool_calls=(call,),
        tool_call_id=call.id,
        tool_name=call.name,
        **of_step(step),
    )


def ended_tool(
    run_id: str, step: int, payload: Payload, at: datetime, started: UIMessage | None
) -> UIMessage:
    """Return the message of a tool that has ended; `started` is the status that it replaces."""
    result = payload["result_summary"] if payload["success"] else None
    error = None if payload["success"] else payload["error"]
    metadata = UIMetadata(
        tool_calls=started.metadata.tool_calls if started and started.metadata else (),
        tool_call_id=payload["tool_call_id"],
        tool_name=payload["tool_name"],
        tool_result=result,
        tool_error=error,
        tool_duration_ms=payload["duration_ms"],
        collapsed=True,
        **of_step(step),
    )
    return UIMessage(
        id=tool_id(run_id, step, payload["tool_call_id"]),
        role=UIRole.TOOL,
        content=(result if payload["success"] else error) or "",
        timestamp=started.timestamp if started else at,
        metadata=metadata,
    )


def retry_message(run_id: str, payload: Payload, at: datetime, attempts: int | None) -> UIMessage:
    """Return the status of a failed model call that is repeated.

    `attempts` is the most that there are; None where that is not known.
    """
    step, coming = payload["step_number"], payload["attempt"] + 1
    most = attempts if attempts is not None and coming <= attempts else None
    seconds = payload["retry_in_seconds"]
    retry = UIRetry(attempt=coming, of=most, retry_in_seconds=seconds)
    which = f"attempt {coming}" + (f" of {most}" if most else "")
    text = f"{which} in {seconds:.1f} s: {payload['error']}"
    identity = f"{step_id(run_id, step)}:retry"
    return status_message(identity, text, at, StatusType.INFO, retry=retry, **of_step(step))


def continuation_message(run_id: str, payload: Payload, at: datetime) -> UIMessage:
    """Return the status that names why a run stops, and which criterion decided it."""
    decision = UIContinuation(**{name: payload[name] for name in UIContinuation.model_fields})
    text = f"Stopped: {decision.stop_reason} ({decision.resolved_by})"
    identity = f"{run_id}:continuation"
    return status_message(identity, text, at, StatusType.CONTINUATION, continuation=decision)
