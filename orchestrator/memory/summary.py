"""The request for a summary of a conversation's older part. Pure; the worker makes the call."""

from collections.abc import Sequence

from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.responses import ModelRequest, ModelSettings

INSTRUCTIONS = (
    "You keep the notes of a conversation between a user, an assistant and the assistant's tools. "
    "Write one summary that can stand in place of what you are shown: the task, facts and results "
    "with their exact names and numbers, decisions, and what is still open. Write nothing else."
)
SUMMARY = "Summary of the conversation so far:\n"
LONGEST_MESSAGE = 8_000
"""Characters of one message that a summary sees; the middle of a longer one is left out."""


def summary_request(
    model: str,
    settings: ModelSettings,
    earlier: str | None,
    messages: Sequence[Message],
    longest: int = LONGEST_MESSAGE,
) -> ModelRequest:
    """Return the request for a summary of `messages` after the summary `earlier`.

    Each message has at most `longest` characters. The request has no tools, and those of the run's
    settings that concern the call and not the text.
    """
    lines = [f"summary so far: {earlier}"] if earlier else []
    lines += [_line(message, longest) for message in messages]
    return ModelRequest(
        model=model,
        messages=(Message.system(INSTRUCTIONS), Message.user("\n\n".join(lines))),
        settings=settings.model_copy(update={"stop": (), "stream": False, "extra_body": {}}),
    )


def summary_message(text: str) -> Message:
    """Return a summary as the message that a request shows in place of what it stands for."""
    return Message.added(SUMMARY + text, "memory")


def _line(message: Message, longest: int) -> str:
    parts = [message.text] if message.text else []
    parts += [
        f"calls {call.name} with {exact_json.text(call.arguments)}" for call in message.tool_calls
    ]
    name = f"tool {message.name}" if message.is_tool() and message.name else message.role.value
    return f"{name}: {_clipped(' '.join(parts), longest)}"


def _clipped(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} [...] {text[-half:]}"
