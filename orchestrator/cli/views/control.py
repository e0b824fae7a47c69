"""Cancels, pauses, resumes, retries and purges runs, sends messages, and prints the outcome."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepfleet.orchestrator.agents.config import named_overrides
from stepfleet.orchestrator.batches.files.lines import INPUT_LIMIT
from stepfleet.orchestrator.batches.selection import Selection
from stepfleet.orchestrator.cli.options import data_option
from stepfleet.orchestrator.cli.setup.with_fleet import with_fleet
from stepfleet.orchestrator.cli.terminal.exit_codes import COMPLETED, SOME_FAILED
from stepfleet.orchestrator.cli.terminal.format import count
from stepfleet.orchestrator.cli.terminal.output import every_second, print_outcome
from stepfleet.orchestrator.client.fleet import AsyncBatch, AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.text.validation import duration
from stepfleet.orchestrator.store.runs.control import ControlOutcome, ControlResult

_DONE = {"cancelled", "requested", "paused", "resumed", "retried", "active", "sent"}
_OUTCOMES = {
    "cancelled": "was cancelled",
    "requested": "is in a worker, which obeys at once, at the latest after its current step",
    "paused": "was paused",
    "resumed": "was resumed",
    "retried": "is retried",
    "sent": "has the message and continues",
    "active": "is already active",
    "ended": "has already ended",
    "changed": "changed in the meantime; repeat the command",
    "unknown": "is unknown",
}


def overrides_of(raised: Sequence[str], option: str = "--raise") -> dict[str, Any]:
    """Return `max_steps=20` and the like as overrides; a value is JSON where it can be read so.

    `option` is the option that they were given by. Raises `ConfigurationError` for one without
    a name and a value. Pure.
    """
    overrides: dict[str, Any] = {}
    for one in raised:
        name, equals, value = one.partition("=")
        if not equals or not name.strip() or not value.strip():
            msg = f"{option} {one}: write FIELD=VALUE, as in {option} max_steps=20"
            raise ConfigurationError(msg)
        try:
            overrides[name.strip()] = exact_json.loads(value)
        except ValueError:
            overrides[name.strip()] = value.strip()
    return named_overrides(overrides)


def check_target(run_id: str | None, batch_id: str | None, *, everything: bool = False) -> None:
    """Raise `ConfigurationError` unless exactly one of run, batch and fleet is named. Pure."""
    if everything and run_id is None and batch_id is None:
        return
    if everything:
        raise ConfigurationError("--all is for the whole fleet; leave RUN and --batch out")
    if (run_id is None) == (batch_id is None):
        raise ConfigurationError("name one RUN, or --batch ID for all runs of a batch")


def request(
    verb: str,
    run_id: str | None,
    batch_id: str | None,
    data: Path,
    *,
    json: bool,
    everything: bool = False,
) -> int:
    """Cancel, pause or resume (`verb`) a run, a batch or the fleet; return the exit code."""
    check_target(run_id, batch_id, everything=everything)

    async def send(fleet: AsyncFleet) -> int:
        if everything:
            await (fleet.pause() if verb == "pause" else fleet.resume())
            return _print_fleet(verb, json=json)
        if run_id is not None:
            return _print_run(run_id, await getattr(fleet.runs, verb)(run_id), json=json)
        batch = await fleet.batches.get(str(batch_id))
        # A request is in force at once, for runs that are not yet updated too.
        report = every_second(lambda rows: f"{verb}: in force; {count(rows)} rows updated so far")
        return _print_batch(verb, batch, await getattr(batch, verb)(report), json=json)

    return with_fleet(data, send)


@dataclass(frozen=True, slots=True)
class Retries:
    """What is to be retried: a run, a line's run, or a batch's runs that did not complete."""

    run: str | None
    batch: str | None
    failed: bool
    where: tuple[str, ...]

    def check(self) -> None:
        """Raise `ConfigurationError` unless it names one run, or runs of a batch. Pure."""
        if self.run is not None and (self.failed or self.where):
            raise ConfigurationError("--failed and --where are for a batch; leave RUN out")
        if self.run is None:
            check_target(self.run, self.batch)
            if not (self.failed or self.where):
                msg = (
                    "retrying a batch needs --failed, for all its runs that did not complete, or "
                    "--where for some of them: 'stepfleet failures ID' shows them by cause"
                )
                raise ConfigurationError(msg)
            Selection.parse(self.where)


def retry_runs(target: Retries, data: Path, *, raised: Sequence[str], json: bool) -> int:
    """Retry an ended run, or a batch's, with the overrides; return the exit code."""
    target.check()
    overrides = overrides_of(raised)

    async def retry(fleet: AsyncFleet) -> int:
        if target.run is not None:
            run_id = await fleet.runs.find(target.run, target.batch)
            return _print_run(run_id, await fleet.runs.retry(run_id, **overrides), json=json)
        batch = await fleet.batches.get(str(target.batch))
        report = every_second(lambda rows: f"retry: {count(rows)} rows examined so far")
        number = await batch.retry(report, where=target.where, **overrides)
        return _print_batch("retry", batch, number, json=json)

    return with_fleet(data, retry)


def send_message(run_id: str, text: str, data: Path, *, raised: Sequence[str], json: bool) -> int:
    """Send an ended run a further message, `-` for standard input; return the exit code."""
    overrides = overrides_of(raised)
    message = standard_input() if text == "-" else text

    async def send(fleet: AsyncFleet) -> int:
        return _print_run(run_id, await fleet.runs.send(run_id, message, **overrides), json=json)

    return with_fleet(data, send)


def standard_input() -> str:
    """Return the text on standard input. Raises `ConfigurationError` where it is not UTF-8."""
    # One byte above the limit is enough for a refusal.
    raw = sys.stdin.buffer.read(INPUT_LIMIT + 1)
    try:
        return raw.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        if len(raw) > INPUT_LIMIT:
            return raw.decode(errors="replace")
        msg = f"standard input is not UTF-8 (byte {error.start + 1}); convert it, as with iconv"
        raise ConfigurationError(msg) from None


def _print_run(run_id: str, result: ControlResult, *, json: bool) -> int:
    data = {"run_id": run_id, "answer": result.outcome, "detail": result.detail}
    outcome = _OUTCOMES.get(result.outcome, result.outcome)
    print_outcome(data, f"Run {run_id} {outcome}{_detail(result)}", json=json)
    return COMPLETED if result.outcome in _DONE else SOME_FAILED


def _print_fleet(verb: str, *, json: bool) -> int:
    paused = (
        f"The fleet is paused: no step begins. To continue: stepfleet resume --all{data_option()}"
    )
    text = paused if verb == "pause" else "The fleet was resumed"
    print_outcome({"fleet": f"{verb}d"}, text, json=json)
    return COMPLETED


def _print_batch(verb: str, batch: AsyncBatch, number: int, *, json: bool) -> int:
    runs = "1 run" if number == 1 else f"{number} runs"
    text = (
        f"Batch {batch.id}: {verb} of {runs}. Progress: stepfleet watch {batch.id}{data_option()}"
    )
    if number == 0:
        status = f"stepfleet status {batch.id}{data_option()}"
        text = f"Batch {batch.id}: nothing to {verb}; its runs: {status}"
    print_outcome({"batch_id": batch.id, "request": verb, "runs": number}, text, json=json)
    return COMPLETED


def _detail(result: ControlResult) -> str:
    if result.outcome in (ControlOutcome.RETRIED, ControlOutcome.SENT):
        return f" at step {int(result.detail) + 1}"
    return f" ({result.detail})" if result.detail else ""


def seconds_of(text: str, option: str) -> int:
    """Return a time in seconds: `90`, `90s`, `15m`, `12h`, `2d`, `1w`.

    Raises `ConfigurationError` for anything else.
    """
    found = duration(text)
    if found is None:
        raise ConfigurationError(f"{option} is {text!r}; write a time like 90s, 12h or 2d")
    return found


def purge_runs(
    runs: Mapping[str, Any], data: Path, *, dry_run: bool, yes: bool, json: bool
) -> None:
    """Remove the ended `runs` (the arguments of `fleet.runs.purge`), or only count them."""

    async def remove(fleet: AsyncFleet) -> None:
        if not dry_run and not yes:
            found = await fleet.runs.purge(**runs, dry_run=True)
            question = f"Remove {_runs(found)} for good?"
            confirm(question, "add --yes, or look with --dry-run", "removed")
        report = every_second(lambda rows: f"purge: {count(rows)} runs so far")
        done = await fleet.runs.purge(**runs, dry_run=dry_run, on_progress=report)
        text = f"{_runs(done)} {'would be removed' if dry_run else 'removed'}"
        print_outcome({"runs": done, "dry_run": dry_run}, text, json=json)

    with_fleet(data, remove)


def confirm(question: str, otherwise: str, nothing: str) -> None:
    """Ask on the terminal. Raises `ConfigurationError` for no terminal or any answer but yes.

    `otherwise` is the way without a terminal, `nothing` what then was not done.
    """
    if not sys.stdin.isatty():
        raise ConfigurationError(f"no terminal to confirm on: {otherwise}")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise ConfigurationError(f"nothing was {nothing}")


def _runs(number: int) -> str:
    return f"{count(number)} ended {'run' if number == 1 else 'runs'}"
