"""Where the command line begins: builds the commands, and turns errors into one message each.

A user's error is a message with its fix and exit code 2; only our own faults show a traceback.
"""

import os
import sys
from typing import Annotated

import typer

from stepfleet.orchestrator.cli.commands.batches import register as batches
from stepfleet.orchestrator.cli.commands.bench import register as bench
from stepfleet.orchestrator.cli.commands.caching import register as caching
from stepfleet.orchestrator.cli.commands.checks import register as checks
from stepfleet.orchestrator.cli.commands.control import register as control
from stepfleet.orchestrator.cli.commands.fleets import register as fleets
from stepfleet.orchestrator.cli.commands.history import register as history
from stepfleet.orchestrator.cli.commands.purge import register as purging
from stepfleet.orchestrator.cli.commands.running import register as running
from stepfleet.orchestrator.cli.commands.runs import register as runs
from stepfleet.orchestrator.cli.terminal.exit_codes import INTERRUPTED, refuse


def _say_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version  # noqa: PLC0415 - for this one question

        typer.echo(version("stepfleet"))
        raise typer.Exit


def build() -> typer.Typer:
    """Return the application with all commands."""
    app = typer.Typer(
        name="stepfleet",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Exit codes: 0 all completed, 1 some runs failed, 2 usage or set-up error, "
        "130 interrupted.",
    )
    app.callback()(_options)
    for register in (
        *(running, fleets, batches, runs, history),
        *(control, purging, caching, bench, checks),
    ):
        register(app)
    return app


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    """Run large fleets of LLM agents, one durable step per task."""
    del version  # said and done before any command


def main() -> None:
    """Run the command that the arguments name; ends the process."""
    try:
        build()()
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # Whoever read our output has left: nothing more to say, and nothing to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except Exception as error:
        message = _said(error)
        if message is None:
            raise
        refuse(message)


def _said(error: BaseException) -> str | None:
    """Return what to tell the user, or None for what is no user's error."""
    # Only code that has run can have raised our errors: not loaded means not raised.
    ours = sys.modules.get("stepfleet.orchestrator.errors")
    if ours is not None and isinstance(error, ours.AgentException):
        return str(error)
    if isinstance(error, ExceptionGroup):
        said = [_said(one) for one in error.exceptions]
        return said[0] if said and all(said) else None
    return None
