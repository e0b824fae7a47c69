"""Adds a strategy's words to a conversation that is about to be sent. Pure."""

from stepfleet.orchestrator.records.messages import Message


def with_paragraph(messages: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """Return the messages with `text` as a further paragraph of the system message."""
    if not text:
        return messages
    first = messages[0] if messages else None
    if first is None or not first.is_system() or not isinstance(first.content, str):
        return (Message.system(text), *messages)
    content = f"{first.content}\n\n{text}" if first.content else text
    return (first.model_copy(update={"content": content}), *messages[1:])
