"""Where the command line begins: builds the commands, and turns errors into one message each.

A user's error is a message with its fix and exit code 2; only our own faults show a traceback.
"""

import os
import sys
from typing import Annotated

import typer

from stepfleet.orchestrator.cli.commands import (
    approvals,
    batches,
    control,
    fleets,
    limits,
    runs,
    schedules,
)
from stepfleet.orchestrator.cli.terminal.exit_codes import INTERRUPTED, USAGE

COMMANDS = (
    *(batches.run, batches.ask, fleets.up, fleets.worker, fleets.flower),
    *(batches.submit, batches.then, batches.status, batches.watch),
    *(batches.failures, batches.results),
    *(runs.ls, runs.show, runs.explain, runs.events),
    *(runs.snapshot, runs.checkpoint, runs.restore, runs.fork, runs.compare),
    *(control.retry, control.send, control.cancel, control.pause, control.resume, control.purge),
    *(approvals.approvals, approvals.approve, approvals.deny, approvals.answer),
    *(fleets.workers, fleets.costs, fleets.doctor),
)


def build() -> typer.Typer:
    """Return the application with all commands."""
    app = typer.Typer(
        name="stepfleet",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        result_callback=_end,
        epilog="Exit codes: 0 all completed, 1 some runs failed, 2 usage or set-up error, "
        "130 interrupted.",
    )
    app.callback()(_options)
    for command in COMMANDS:
        app.command()(command)
    cache = typer.Typer(
        name="cache", no_args_is_help=True, help="Inspect and clear the response cache."
    )
    cache.command("stats")(fleets.cache_stats)
    cache.command("clear")(fleets.cache_clear)
    app.add_typer(cache)
    shared = typer.Typer(name="limits", no_args_is_help=True, help="Limits of the whole fleet.")
    shared.command("show")(limits.limits_show)
    shared.command("set")(limits.limits_set)
    shared.command("clear")(limits.limits_clear)
    app.add_typer(shared)
    timed = typer.Typer(
        name="schedule", no_args_is_help=True, help="Batches that are submitted again and again."
    )
    timed.command("add")(schedules.schedule_add)
    timed.command("list")(schedules.schedule_list)
    timed.command("show")(schedules.schedule_show)
    timed.command("pause")(schedules.schedule_pause)
    timed.command("resume")(schedules.schedule_resume)
    timed.command("remove")(schedules.schedule_remove)
    timed.command("run-now")(schedules.schedule_run_now)
    app.add_typer(timed)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415 - for this option only

        typer.echo(version("stepfleet"))
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Run large fleets of LLM agents, one durable step per task."""
    del version  # its callback has printed it


def _end(code: int | None, **_options: object) -> None:
    """End with the exit code that a command returns."""
    if code:
        raise typer.Exit(code)


def main() -> None:
    """Run the command that the arguments name; ends the process."""
    try:
        build()()
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of our output is gone: there is nothing more to print, and nowhere to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except Exception as error:
        message = _message(error)
        if message is None:
            raise
        sys.stderr.write(f"Error: {message}\n")
        sys.stderr.flush()
        raise SystemExit(USAGE) from None


def _message(error: BaseException) -> str | None:
    """Return the message of a user's error; None for any other error."""
    # Only code that has run can have raised our errors: not loaded means not raised.
    ours = sys.modules.get("stepfleet.orchestrator.errors")
    if ours is not None and isinstance(error, ours.AgentException):
        from stepfleet.orchestrator.cli.terminal.format import shown  # noqa: PLC0415 - seldom
        from stepfleet.orchestrator.cli.terminal.words import in_cli_words  # noqa: PLC0415

        return shown(in_cli_words(str(error)))  # it may quote what a model has written
    if isinstance(error, ExceptionGroup):
        messages = [_message(one) for one in error.exceptions]
        return messages[0] if messages and all(messages) else None
    return None
