"""A conversation in this process that keeps itself within a memory policy."""

from collections.abc import Callable, Iterable, Sequence

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.memory.policy import MemoryPolicy
from stepfleet.orchestrator.memory.pruning import (
    Count,
    estimate_tokens,
    limited,
    prune_to_token_limit,
    split,
    whole,
)
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


Summarize = Callable[[str | None, Sequence[Message]], str]


class MemoryManager:
    """Messages under a policy, which holds after every addition.

    For code that leads conversations itself; a run's memory is its log (see `window`).
    `summarize` gets the summary so far (or None) and the messages that leave, and returns the
    new summary; a policy with `summarize_after` takes it. Raises `ConfigurationError` without.
    """

    def __init__(
        self,
        policy: MemoryPolicy | None = None,
        messages: Iterable[Message] = (),
        count: Count = estimate_tokens,
        summarize: Summarize | None = None,
    ) -> None:
        self.policy = policy or MemoryPolicy()
        if self.policy.summarize_after is not None and summarize is None:
            raise ConfigurationError("summarize_after needs summarize=, which makes the summary")
        self.summary: str | None = None
        self._count = count
        self._summarize = summarize
        self._messages: tuple[Message, ...] = ()
        for message in messages:
            self.add_message(message)

    def add_message(self, message: Message) -> None:
        """Add a message; the oldest leave by the policy."""
        messages = (*self._messages, message)
        after = self.policy.summarize_after
        if after is not None and self._summarize is not None:
            messages = self._summarized(messages, after, self._summarize)
        self._messages = limited(messages, self.policy, self._count)

    def get_messages(self) -> list[Message]:
        """Return the messages, in a list of the caller's own; a summary follows the system's."""
        if self.summary is None:
            return list(self._messages)
        system, rest = split(self._messages, self.policy)
        return [*system, summary_message(self.summary), *rest]

    def clear(self) -> None:
        """Forget everything but, with `keep_system`, the system messages."""
        kept = self._messages if self.policy.keep_system else ()
        self._messages = tuple(one for one in kept if one.is_system())
        self.summary = None

    def prune_to_token_limit(self, limit: int | None) -> None:
        """Shorten to about `limit` tokens, as after a `ContextWindowError`; None: to half."""
        self._messages = prune_to_token_limit(self._messages, limit)

    def _summarized(
        self, messages: tuple[Message, ...], after: int, summarize: Summarize
    ) -> tuple[Message, ...]:
        system, rest = split(messages, self.policy)
        if len(rest) <= after:
            return messages
        recent = whole(rest[len(rest) - after // 2 :])
        if not recent:  # the newest exchange alone is longer
            return messages
        self.summary = summarize(self.summary, rest[: len(rest) - len(recent)])
        return (*system, *recent)
