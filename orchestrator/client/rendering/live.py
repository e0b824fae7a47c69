"""A chat window while its run goes on: event envelopes in, messages out. Keeps no clock.

Events may come twice, and text late: what was seen before changes nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from stepfleet.orchestrator.client.rendering.event_messages import (
    continuation_message,
    error_message,
    retry_message,
    started_tool,
    thinking,
    tool_of,
)
from stepfleet.orchestrator.client.rendering.messages import (
    StatusType,
    UIContinuation,
    UIMessage,
    UIMetadata,
    UIRole,
    answer_id,
    group_of,
    step_id,
)
from stepfleet.orchestrator.client.rendering.reconciliation import reconciled
from stepfleet.orchestrator.client.rendering.rules import should_render_assistant_content
from stepfleet.orchestrator.events.envelope import EventType
from stepfleet.orchestrator.events.streamed_text import StreamedText
from stepfleet.orchestrator.records.state import TERMINAL, Lifecycle


class LiveMessages:
    """The messages of one run, folded from its events and the chunks of its text.

    `shown` is what is in view already: a history, or the user's own message. `attempts` is the
    agent's `model_attempts`, for the retry indicator. With `continuation` the decision that ends
    the run is told where its events have it (`include_continuation_trace`).
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
        self._turn = 0  # the newest step of the turn before
        self._status: Lifecycle | None = None
        self._now: datetime | None = None

    @property
    def messages(self) -> tuple[UIMessage, ...]:
        """What is shown now, in order; the last one may be a status that says what goes on."""
        every = self._messages.values()
        working = {_group(one) for one in every if one.tool_call_id is not None}
        shown = tuple(one for one in every if self._is_shown(one, working))
        if self._status is not Lifecycle.IN_PROGRESS or self._text.is_open or self._now is None:
            return shown
        return (*shown, thinking(self._run_id, self._now))

    @property
    def sequence(self) -> int:
        """The number of the newest event that was taken; 0 before the first."""
        return self._sequence

    @property
    def is_over(self) -> bool:
        """Whether the run has ended: then fetch its history and `reconcile`."""
        return self._status in TERMINAL

    def reconcile(self, history: Sequence[UIMessage]) -> tuple[UIMessage, ...]:
        """Put the stored history in the place of what was streamed, and return what is shown."""
        self._messages = {one.id: one for one in reconciled(self._messages.values(), history)}
        return self.messages

    def add(self, envelope: Mapping[str, Any]) -> bool:
        """Take an envelope of any type; return whether there may be something new to show."""
        at = datetime.fromisoformat(envelope["timestamp"])
        if envelope["type"] == EventType.STREAM_CHUNK:
            return self._add_chunk(envelope, at)
        if envelope["sequence"] <= self._sequence:
            return False
        self._sequence, self._now = envelope["sequence"], at
        told = envelope["payload"]
        match envelope["type"]:
            case EventType.STATUS:
                self._add_status(told, at)
            case EventType.STEP_STARTED:
                self._begin(told["step_number"])
            case EventType.STEP_RETRIED:
                self._put(retry_message(self._run_id, told, at, self._attempts))
            case EventType.TOOL_STARTED:
                self._put(started_tool(self._run_id, self._step, told, at))
            case EventType.TOOL_COMPLETED:
                known = self._messages.get(started_tool(self._run_id, self._step, told, at).id)
                self._put(tool_of(self._run_id, self._step, told, at, known))
            case EventType.STEP_COMPLETED:
                self._complete(told, at)
            case EventType.CONTINUATION:
                self._decide(told, at)
            case _:
                return False
        return True

    def _add_chunk(self, envelope: Mapping[str, Any], at: datetime) -> bool:
        if not self._text.add(envelope):
            return False
        step = envelope["payload"]["step_number"]
        known = self._messages.get(step_id(self._run_id, step))
        message = known or self._said(step_id(self._run_id, step), step, "", at)
        self._put(message.model_copy(update={"content": self._text.of(step)}), ahead=True)
        return True

    def _begin(self, step: int) -> None:
        """Forget what was said of earlier attempts at a step."""
        self._step = step
        for identity in [one for one in self._messages if _is_of_attempt(one, self._run_id, step)]:
            del self._messages[identity]

    def _complete(self, told: Mapping[str, Any], at: datetime) -> None:
        step = told["step_number"]
        group = [one for one in self._messages.values() if _group(one) == group_of(step)]
        in_tools = {one.metadata.tool_error for one in group if one.metadata}
        if group:
            timing = {"step_duration_ms": told["duration_ms"], "usage": told["usage"]}
            known = group[0].metadata or UIMetadata()
            metadata = UIMetadata.model_validate({**known.model_dump(), **timing})
            self._put(group[0].model_copy(update={"metadata": metadata}))
        failed = [error for error in told["errors"] if error not in in_tools]
        for number, error in enumerate(failed):
            identity = f"{step_id(self._run_id, step)}:error:{number}"
            self._put(error_message(identity, error, at, step))

    def _add_status(self, told: Mapping[str, Any], at: datetime) -> None:
        if self.is_over:
            self._turn = self._step
        self._status = Lifecycle(told["status"])
        identity = f"{self._run_id}:status"
        self._messages.pop(identity, None)
        if self._status in (Lifecycle.PAUSED, Lifecycle.CANCELLED, Lifecycle.STOPPED):
            metadata = UIMetadata(status_type=StatusType.INFO)
            word = self._status.value.capitalize()
            self._put(
                UIMessage(
                    id=identity, role=UIRole.STATUS, content=word, timestamp=at, metadata=metadata
                )
            )
        if not self.is_over:
            return
        if told["last_response"] and self._status in (Lifecycle.COMPLETED, Lifecycle.STOPPED):
            self._answer(told["last_response"], at)
        shown = {one.content for one in self._messages.values() if one.is_error}
        if told["error_message"] and told["error_message"] not in shown:
            identity = f"{self._run_id}:error:{self._sequence}"
            self._put(error_message(identity, told["error_message"], at))

    def _answer(self, text: str, at: datetime) -> None:
        """Show the turn's last text, where no chunk has told it."""
        own = {group_of(step) for step in range(self._turn + 1, self._step + 1)}
        said = (one for one in self._messages.values() if _group(one) in own)
        if not own or text in {one.content for one in said if one.role is UIRole.ASSISTANT}:
            return
        calls = any(_group(one) == group_of(self._step) for one in self._messages.values())
        identity = (answer_id if calls else step_id)(self._run_id, self._step)
        self._put(self._said(identity, self._step, text, at))

    def _decide(self, told: Mapping[str, Any], at: datetime) -> None:
        if self._shows_continuation and not told["should_continue"]:
            known = {name: told[name] for name in UIContinuation.model_fields}
            self._put(continuation_message(self._run_id, UIContinuation(**known), at))

    def _said(self, identity: str, step: int, text: str, at: datetime) -> UIMessage:
        metadata = UIMetadata(step=step, group=group_of(step))
        return UIMessage(
            id=identity, role=UIRole.ASSISTANT, content=text, timestamp=at, metadata=metadata
        )

    def _is_shown(self, message: UIMessage, working: set[str | None]) -> bool:
        """Return whether a text is for people, now that its step calls tools or not."""
        step = message.metadata.step if message.metadata else None
        if step is None or message.id != step_id(self._run_id, step):
            return True
        calls = _group(message) in working
        return should_render_assistant_content(message.content, has_tool_calls=calls)

    def _put(self, message: UIMessage, *, ahead: bool = False) -> None:
        """Show a message in the place of the one with its id, else last, or `ahead` of its step."""
        if message.id in self._messages or not ahead:
            self._messages[message.id] = message
            return
        placed: dict[str, UIMessage] = {}
        for identity, one in self._messages.items():
            if message.id not in placed and _group(one) == _group(message):
                placed[message.id] = message
            placed[identity] = one
        self._messages = {**placed, message.id: message}


def _is_of_attempt(identity: str, run_id: str, step: int) -> bool:
    prefix = step_id(run_id, step)
    return identity.startswith((f"{prefix}:error:", f"{prefix}:retry", f"{prefix}:tool:"))


def _group(message: UIMessage) -> str | None:
    return message.metadata.group if message.metadata else None
