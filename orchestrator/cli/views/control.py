"""Cancel, pause, resume and retry, of one run or of a batch's; a further message to one run."""

import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from stepfleet.orchestrator.batches.lines import INPUT_LIMIT
from stepfleet.orchestrator.cli.setup.with_fleet import with_fleet
from stepfleet.orchestrator.cli.terminal.exit_codes import COMPLETED, SOME_FAILED
from stepfleet.orchestrator.cli.terminal.output import notice, print_json, screen
from stepfleet.orchestrator.client.batch import OnProgress
from stepfleet.orchestrator.client.fleet import AsyncBatch, AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.store.runs.control import ControlOutcome, ControlResult

SAID_SECONDS = 1.0
_DONE = {"cancelled", "requested", "paused", "resumed", "retried", "active", "sent"}
_SAYS = {
    "cancelled": "cancelled",
    "requested": "asked for; its worker does it at once, at the latest at the end of its step",
    "paused": "paused",
    "resumed": "goes on",
    "retried": "is retried",
    "sent": "has the message and goes on",
    "active": "is active already",
    "ended": "has ended already",
    "changed": "changed meanwhile; ask again",
    "unknown": "is not known",
}


def overrides_of(raised: Sequence[str], option: str = "--raise") -> dict[str, Any]:
    """Return `max_steps=20` and the like as overrides; values are read as JSON where they are.

    `option` is what the user typed in front of them. Raises `ConfigurationError` for one without
    a name and a value. Pure.
    """
    overrides: dict[str, Any] = {}
    for one in raised:
        name, equals, value = one.partition("=")
        if not equals or not name.strip() or not value.strip():
            msg = f"{option} {one}: write FIELD=VALUE, as in {option} max_steps=20"
            raise ConfigurationError(msg)
        try:
            overrides[name.strip()] = orjson.loads(value)
        except orjson.JSONDecodeError:
            overrides[name.strip()] = value.strip()
    return overrides


def which(run_id: str | None, batch_id: str | None, *, everything: bool = False) -> None:
    """Raise `ConfigurationError` unless exactly one of a run and a batch is named. Pure."""
    if everything and run_id is None and batch_id is None:
        return
    if everything:
        raise ConfigurationError("--all is for the whole fleet; leave RUN and --batch out")
    if (run_id is None) == (batch_id is None):
        raise ConfigurationError("name one RUN, or --batch ID for all runs of a batch")


def ask_one_or_all(
    word: str,
    run_id: str | None,
    batch_id: str | None,
    data: Path,
    *,
    json: bool,
    everything: bool = False,
) -> int:
    """Cancel, pause or resume (`word`), `everything`: the fleet; return the exit code."""
    which(run_id, batch_id, everything=everything)

    async def ask(fleet: AsyncFleet) -> int:
        if everything:
            await (fleet.pause() if word == "pause" else fleet.resume())
            return _say_fleet(word, json=json)
        if run_id is not None:
            action: Callable[[str], Awaitable[ControlResult]] = getattr(fleet.runs, word)
            return _say(run_id, await action(run_id), json=json)
        batch = await fleet.batches.get(str(batch_id))
        all_of_it: Callable[[OnProgress], Awaitable[int]] = getattr(batch, word)
        return _say_count(word, batch, await all_of_it(_said(word)), json=json)

    return with_fleet(data, ask)


def retry_one_or_all(
    run_id: str | None,
    batch_id: str | None,
    data: Path,
    *,
    failed: bool,
    raised: Sequence[str],
    json: bool,
) -> int:
    """Take an ended run, or a batch's, up again with the overrides; return the exit code."""
    which(run_id, batch_id)
    if batch_id is not None and not failed:
        msg = "retrying a batch needs --failed: its runs that did not complete are done again"
        raise ConfigurationError(msg)
    overrides = overrides_of(raised)

    async def retry(fleet: AsyncFleet) -> int:
        if run_id is not None:
            return _say(run_id, await fleet.runs.retry(run_id, **overrides), json=json)
        batch = await fleet.batches.get(str(batch_id))
        return _say_count("retry", batch, await batch.retry(_looked_at(), **overrides), json=json)

    return with_fleet(data, retry)


def send_message(run_id: str, text: str, data: Path, *, raised: Sequence[str], json: bool) -> int:
    """Give an ended run a further message, `-` for standard input; return the exit code."""
    overrides = overrides_of(raised)
    message = _standard_input() if text == "-" else text

    async def send(fleet: AsyncFleet) -> int:
        return _say(run_id, await fleet.runs.send(run_id, message, **overrides), json=json)

    return with_fleet(data, send)


def _standard_input() -> str:
    # One byte more than may be sent is enough to be refused for its size.
    raw = sys.stdin.buffer.read(INPUT_LIMIT + 1)
    try:
        return raw.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        if len(raw) > INPUT_LIMIT:
            return raw.decode(errors="replace")
        msg = f"standard input is not UTF-8 (byte {error.start + 1}); convert it, as with iconv"
        raise ConfigurationError(msg) from None


def _say(run_id: str, result: ControlResult, *, json: bool) -> int:
    if json:
        print_json({"run_id": run_id, "answer": result.outcome, "detail": result.detail})
    else:
        says = _SAYS.get(result.outcome, result.outcome)
        screen().print(f"Run {run_id} {says}{_detail(result)}")
    return COMPLETED if result.outcome in _DONE else SOME_FAILED


def _say_fleet(word: str, *, json: bool) -> int:
    if json:
        print_json({"fleet": f"{word}d"})
    elif word == "pause":
        screen().print("The fleet is paused: no step begins. On again: stepfleet resume --all")
    else:
        screen().print("The fleet goes on")
    return COMPLETED


def _said(word: str) -> OnProgress:
    """Return what says now and then how far a request has come; it holds already."""
    return _now_and_then(lambda rows: f"{word}: in force; {rows} rows noted so far")


def _looked_at() -> OnProgress:
    """Return what says now and then how far a retry has come."""
    return _now_and_then(lambda rows: f"retry: {rows} rows looked at so far")


def _now_and_then(text: Callable[[int], str]) -> OnProgress:
    last = time.monotonic()

    def say(rows: int) -> None:
        nonlocal last
        if time.monotonic() - last > SAID_SECONDS:
            last = time.monotonic()
            notice(text(rows))

    return say


def _detail(result: ControlResult) -> str:
    if result.outcome in (ControlOutcome.RETRIED, ControlOutcome.SENT):
        return f" at step {int(result.detail) + 1}"
    return f" ({result.detail})" if result.detail else ""


def _say_count(word: str, batch: AsyncBatch, number: int, *, json: bool) -> int:
    if json:
        print_json({"batch_id": batch.id, "request": word, "runs": number})
    else:
        runs = "1 run" if number == 1 else f"{number} runs"
        screen().print(f"Batch {batch.id}: {word} of {runs}. See: stepfleet watch {batch.id}")
    return COMPLETED
