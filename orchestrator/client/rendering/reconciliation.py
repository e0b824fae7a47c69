"""What stays in view when a run has ended: its history, and the errors that came up. Pure."""

from collections.abc import Iterable, Sequence

from stepfleet.orchestrator.client.rendering.messages import UIMessage


def reconciled(shown: Iterable[UIMessage], history: Sequence[UIMessage]) -> tuple[UIMessage, ...]:
    """Return the history with the errors that were shown, each where it stood.

    Streamed messages give way to stored ones of the same id or tool call; statuses that are no
    errors go, and so does what the history does not have: it is the truth.
    """
    behind: dict[int, list[UIMessage]] = {}
    place = -1
    for message in shown:
        if not message.is_status:
            place = max(place, _place_of(message, history))
        elif message.is_error:
            behind.setdefault(place, []).append(message)
    merged = list(behind.get(-1, ()))
    for number, message in enumerate(history):
        merged += [message, *behind.get(number, ())]
    return tuple(merged)


def _place_of(message: UIMessage, history: Sequence[UIMessage]) -> int:
    """Return where the history has the same message; -1 where it has none."""
    for number, stored in enumerate(history):
        if stored.id == message.id:
            return number
    call = message.tool_call_id
    if call is None:
        return -1
    calls = [number for number, stored in enumerate(history) if stored.tool_call_id == call]
    return calls[-1] if calls else -1
