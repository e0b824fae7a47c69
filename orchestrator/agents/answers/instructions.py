"""What a model is told of its answer: one paragraph of the system message, and reminders. Pure."""

from stepfleet.orchestrator.agents.answers.definitions import FINAL_ANSWER, STRUCTURED_RESPONSE
from stepfleet.orchestrator.records.messages import Message
from stepfleet.orchestrator.tools.schemas.bounded_json import canonical_json
from stepfleet.orchestrator.tools.schemas.handles import SchemaHandle


def paragraph(schema: SchemaHandle | None, *, native: bool) -> str:
    """Return how the model is to answer. `native`: as a message, not by a tool."""
    if schema and native:
        return (
            "Give your answer as one JSON object that fits this JSON Schema, and nothing else: "
            f"{canonical_json(schema.schema)}"
        )
    tool = STRUCTURED_RESPONSE if schema else FINAL_ANSWER
    what = "data that fits its schema" if schema else "your complete answer"
    return (
        f"When you have the answer, call the tool {tool} with {what}, alone in its turn. "
        "Text without that call is not taken as an answer."
    )


def reminder(schema: SchemaHandle | None) -> str:
    """Return what text without a call is answered with."""
    tool = STRUCTURED_RESPONSE if schema else FINAL_ANSWER
    return (
        "That was not taken as an answer: text alone does not end the task. "
        f"Call {tool} to give your answer, or another tool to go on."
    )


def correction(problems: str) -> str:
    """Return what a message that is no valid answer is answered with."""
    return (
        f"That was not taken as an answer: {problems}. "
        "Answer again with one JSON object that fits the schema, and nothing else."
    )


def instructed(messages: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """Return the conversation with `text` in its system message, where it is not there yet."""
    first = messages[0] if messages else None
    if first is None or not first.is_system():
        return (Message.system(text), *messages)
    if text in first.text:
        return messages
    if isinstance(first.content, str):
        content = f"{first.content}\n\n{text}" if first.content else text
        return (first.model_copy(update={"content": content}), *messages[1:])
    blocks = [*first.content, {"text": f"\n\n{text}"}]
    return (first.model_copy(update={"content": blocks}), *messages[1:])
