"""The user template: the run's prompt worded anew for each call. Pure.

Replaces two names and nothing else, so that neither a prompt nor a history can reach into the
program.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

from stepfleet.orchestrator.records.conversation.messages import Message

_PLACE = re.compile(r"\{\{\s*(prompt|history)\s*\}\}|\{(prompt|history)\}")


def checked_template(template: str) -> str:
    """Return `template`; raises `ValueError` where it has no place for the prompt."""
    if "prompt" not in {first or second for first, second in _PLACE.findall(template)}:
        raise ValueError("it has no place for the prompt; put {prompt} into it")
    return template


Template = Annotated[str, AfterValidator(checked_template)]


def rendered(template: str, prompt: str, history: Iterable[Any]) -> str:
    """Return `template` with `{prompt}` and `{history}` (or `{{ ... }}`) filled in."""
    values = {"prompt": prompt, "history": history_text(history)}
    return _PLACE.sub(lambda found: values[found[1] or found[2]], template)


def history_text(history: Iterable[Any]) -> str:
    """Return a history as text: an entry per paragraph, its filled fields a line each."""
    return "\n\n".join(_entry(one) for one in history)


def with_prompt(
    messages: tuple[Message, ...], template: str, history: Iterable[Any]
) -> tuple[Message, ...]:
    """Return the messages with the newest prompt of a user worded by `template`."""
    place = _place_of_prompt(messages)
    if place is None:
        return messages
    worded = _worded(messages[place], template, history)
    return (*messages[:place], worded, *messages[place + 1 :])


def prompt_of(messages: tuple[Message, ...]) -> str:
    """Return the text of the newest prompt of a user; "" where there is none."""
    place = _place_of_prompt(messages)
    return "" if place is None else messages[place].text


def _place_of_prompt(messages: tuple[Message, ...]) -> int | None:
    places = range(len(messages) - 1, -1, -1)
    return next((n for n in places if messages[n].is_prompt()), None)


def _worded(message: Message, template: str, history: Iterable[Any]) -> Message:
    text = rendered(template, message.text, history)
    if isinstance(message.content, str):
        return message.model_copy(update={"content": text})
    media = [block for block in message.content if "text" not in block]
    return message.model_copy(update={"content": [{"text": text}, *media]})


def _entry(entry: Any) -> str:
    if not isinstance(entry, Mapping):
        return _value(entry)
    return "\n".join(
        f"{name}: {_value(value)}" for name, value in entry.items() if value not in (None, "")
    )


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
