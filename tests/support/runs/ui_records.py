"""A run's records and events for tests of what a chat window shows."""

from datetime import datetime, timedelta
from typing import Any

from support.runs.agent_records import START, a_call, a_step

from stepfleet.orchestrator import LoggedStep, Message, ToolCall, ToolCallRecord, UsageStats
from stepfleet.orchestrator.client.rendering import LiveMessages, Recorded
from stepfleet.orchestrator.events.envelope import stamp
from stepfleet.orchestrator.records.conversation.messages import result_text

RUN = "run-1"
USAGE = UsageStats(prompt_tokens=10, completion_tokens=5, total_tokens=15, llm_calls=1)


def a_turn(number: int, text: str, *calls: ToolCallRecord, **fields: Any) -> LoggedStep:
    """Return a committed step in which the model said `text` and asked for `calls`."""
    asked = tuple(
        ToolCall(id=one.call_id, name=one.tool_name, arguments=one.arguments) for one in calls
    )
    answered = (
        Message.tool(call, result_text(one)) for call, one in zip(asked, calls, strict=True)
    )
    result = a_step(
        number,
        thought=text or None,
        tool_calls=calls,
        usage=USAGE,
        duration_ms=120.0,
        started_at=START + timedelta(seconds=number),
    )
    given = {
        "result": result,
        "messages": (Message.assistant(text, asked), *answered),
        "committed_at": START + timedelta(seconds=number, milliseconds=500),
    }
    return LoggedStep(**{**given, **fields})


def a_recorded(*log: LoggedStep, **inputs: tuple[Message, ...]) -> Recorded:
    """Return a conversation that began with "hi", unless `at_N` inputs say otherwise."""
    given = {int(name.removeprefix("at_")): said for name, said in inputs.items()}
    return Recorded(RUN, START, given or {0: (Message.user("hi"),)}, log)


def two_steps() -> Recorded:
    """Return a run that adds in words, and then answers."""
    return a_recorded(a_turn(1, "Let me add.", a_call("c1")), a_turn(2, "It is 3."))


class Told:
    """Tells events one after the other, numbered, a millisecond apart."""

    def __init__(self, window: LiveMessages) -> None:
        self.window = window
        self.count = 0

    @property
    def now(self) -> datetime:
        """The time of the newest event."""
        return START + timedelta(milliseconds=self.count)

    def tell(self, kind: str, **payload: Any) -> bool:
        """Tell an event."""
        self.count += 1
        return self.window.add(self.envelope(kind, **payload))

    def envelope(self, kind: str, **payload: Any) -> dict[str, Any]:
        """Return an envelope as followers get it."""
        return {
            "sequence": self.count,
            "event_id": f"{RUN}:{self.count}",
            "type": f"agent.{kind}",
            "session_id": RUN,
            "execution_id": f"{RUN}:1",
            "timestamp": stamp(self.now),
            "payload": payload,
        }

    def status(self, status: str, **payload: Any) -> bool:
        """Tell a change of status."""
        given = {"error_message": None, "last_response": None, "step_count": 0}
        return self.tell("status", status=status, previous_status=None, **{**given, **payload})

    def started(self, step: int) -> bool:
        """Tell that a step began."""
        return self.tell("step.started", step_number=step, message_count=1, available_tools=[])

    def tool_started(self, call_id: str, name: str = "add", summary: str = "a: 1, b: 2") -> bool:
        """Tell that a tool began."""
        told = {"tool_name": name, "tool_call_id": call_id, "args_summary": summary}
        return self.tell("tool.started", **told)

    def tool_completed(
        self, call_id: str, name: str = "add", result: str | None = "3", error: str | None = None
    ) -> bool:
        """Tell that a tool ended."""
        return self.tell(
            "tool.completed",
            tool_name=name,
            tool_call_id=call_id,
            success=error is None,
            error=error,
            duration_ms=12.0,
            result_summary=None if error else result,
        )

    def completed(self, step: int, *errors: str, calls: bool = False) -> bool:
        """Tell that a step was committed."""
        return self.tell(
            "step.completed",
            step_number=step,
            has_tool_calls=calls,
            errors=list(errors),
            finish_reason="stop",
            usage=USAGE.to_dict(),
            duration_ms=120.0,
        )

    def chunk(self, step: int, index: int, text: str, *, last: bool = False) -> bool:
        """Tell a piece of text; chunks have no sequence number."""
        told = self.envelope(
            "stream.chunk",
            step_number=step,
            attempt=1,
            chunk_index=index,
            chunk=text,
            tokens_delta=1,
            is_complete=last,
        )
        del told["sequence"], told["event_id"]
        return self.window.add(told)

    def two_steps(self) -> None:
        """Tell the run of `two_steps`, its text as it is written."""
        self.status("queued")
        self.status("in_progress")
        self.chunk(1, 0, "Let me ")
        self.chunk(1, 1, "add.", last=True)
        self.started(1)
        self.tool_started("c1")
        self.tool_completed("c1")
        self.completed(1, calls=True)
        self.chunk(2, 0, "It is 3.", last=True)
        self.started(2)
        self.completed(2)
        self.status("completed", last_response="It is 3.", step_count=2)
