"""A conversation in this process that keeps itself within a memory policy."""

from collections.abc import Callable, Iterable, Sequence

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.memory.limits import Count, limited, split, whole
from stepfleet.orchestrator.memory.policy import MemoryPolicy
from stepfleet.orchestrator.memory.pruning import estimate_tokens, prune_to_token_limit
from stepfleet.orchestrator.memory.summary import summary_message
from stepfleet.orchestrator.records.conversation.messages import Message

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
