"""Where the command line begins: which commands there are, and errors as one message each.

A command's module is imported when the command is called: help and completion answer at once.
A user's error is a message with its fix and exit code 2; only our own faults show a traceback.
"""

import gc
import os
import re
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from stepfleet.orchestrator.cli.options import INTERRUPTED, USAGE, called_as, with_records

GROUPS = {
    "Run": {
        "run": ("run", "Run a file of inputs: Redis, workers, progress and results."),
        "ask": ("ask", "Ask an agent one question, and print its answer."),
        "submit": ("submit", "Submit a file of inputs to a fleet, and print the batch's id."),
        "watch": ("submit", "Show a batch's progress until it has ended."),
        "results": ("submit", "Write the results of a batch to the screen or a file."),
    },
    "Look": {
        "status": ("look", "Show a batch, or the fleet: its workers and newest batches."),
        "explain": ("explain", "Explain why a run stopped, continues or does not move."),
        "failures": ("look", "Group runs that did not complete by cause."),
        "ls": ("look", "List runs, the newest first; all conditions hold."),
        "show": ("look", "Show a run's trace: its input, steps, tools, answer."),
        "events": ("look", "Print a run's events, a line of JSON each."),
        "compare": ("look", "Compare two runs: their costs, the step where they differ."),
        "costs": ("costs", "Show what model calls have cost."),
    },
    "Steer": {
        "cancel": ("steer", "Cancel a run, or all open runs of a batch."),
        "pause": ("steer", "Pause a run, a batch or the fleet."),
        "resume": ("steer", "Resume a paused run, batch or fleet."),
        "retry": ("steer", "Continue ended runs at their failed step."),
        "send": ("steer", "Send an ended run a further message."),
        "fork": ("steer", "Start a run that begins with the first steps of another one."),
        "checkpoints": ("steer", "Save runs as files or short JSON, and restore them."),
        "purge": ("steer", "Remove ended runs before their retention is over."),
    },
    "People": {
        "approvals": ("approvals", "List the calls and questions that wait for a person."),
        "decide": ("approvals", "Approve or deny calls that wait, or answer a question."),
    },
    "Operate": {
        "up": ("operate", "Run a local fleet until Ctrl-C: Redis and workers."),
        "worker": ("workers", "Run one Celery worker in the foreground."),
        "keeper": ("workers", "Run a keeper in the foreground: all that workers do beside steps."),
        "flower": ("operate", "Run Flower on the fleet's broker."),
        "doctor": ("live", "Check the set-up, and name the fix for each problem."),
        "limits": ("operate", "Show, set and clear limits of the whole fleet."),
        "scale": ("scale", "Show how many workers there should be."),
        "schedule": ("schedules", "Batches that are submitted again and again."),
        "cache": ("operate", "Inspect and clear the response cache."),
        "archive": ("archive", "Move ended runs that are due from Redis to the archive."),
        "audit": ("audit", "Show who changed what, from where."),
    },
}
"""The headings of `--help`; below each its commands, with their modules and a line of help."""
OLD_WORDS = {
    "then": ("submit", "The same as submit --after-batch."),
    "workers": ("look", "The workers, which status shows too."),
    "snapshot": ("steer", "The same as checkpoints snapshot."),
    "checkpoint": ("steer", "The same as checkpoints write."),
    "restore": ("steer", "The same as checkpoints restore."),
    "approve": ("approvals", "The same as decide --approve."),
    "deny": ("approvals", "The same as decide --deny."),
    "answer": ("approvals", "The same as decide --answer."),
}
"""Commands of earlier versions: they work, and `--help` does not list them."""
_WORDS = (
    (re.compile(r"\b(retry|send) with (\w+)="), r"--raise \2="),
    (re.compile(r"\b(fork|restore) with (\w+)="), r"--set \2="),
    (re.compile(r"\bskip_invalid=True\b"), "--skip-invalid"),
    (re.compile(r"\(at=(\d+)\)"), r"(--at \1)"),
    (re.compile(r"\(agent=\.\.\.\)"), "(--agent)"),
    (re.compile(r"\bgive page=N\b"), "give --page N"),
    (re.compile(r"\badd archived=True\b"), "add --archived"),
    (
        re.compile(r"\bor for the whole batch with agent=\.\.\."),
        "or for all lines with --agent NAME",
    ),
    (re.compile(r"or pass the agent itself"), "or name its module here: --agents MODULE"),
    (
        re.compile(r"\bchoose another id \(uuid\.uuid4\(\)\) for this one"),
        "restore a copy with an id of its own: --as-new",
    ),
    (
        re.compile(r"\brestore with the agent that continues\b"),
        "name the agent that continues: --agent",
    ),
)
_HELP_OPTIONS = ["-h", "--help"]
_HELP = {"help_option_names": _HELP_OPTIONS}


class Command(TyperCommand):
    """A command's name and line of help, which stand for it until it is called."""

    def __init__(self, name: str, module: str, line: str, heading: str | None) -> None:
        super().__init__(name, help=line, rich_help_panel=heading, hidden=heading is None)
        self._module = module

    def load(self, *, runs: bool = False) -> Any:
        """Return the command itself: the function or the `Typer` of that name in its module.

        One that `runs` is imported; for help its options are read from the source.
        """
        if runs:
            known = vars(import_module(f"{__package__}.{self._module}"))
        else:
            from stepfleet.orchestrator.cli.signatures import commands_of  # noqa: PLC0415 - for help

            known = commands_of(self._module)
        found = known[str(self.name)]
        if isinstance(found, typer.Typer):
            return typer.main.get_group(found)
        app = typer.Typer(add_completion=False, context_settings=_HELP)
        app.command(self.name)(with_records(found))
        return typer.main.get_command(app)

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Return the context of the command itself, which then runs."""
        asks = extra.get("resilient_parsing") or not set(args).isdisjoint(_HELP_OPTIONS)
        command = self.load(runs=not asks)
        part = [args[0]] if args and args[0] in getattr(command, "commands", ()) else []
        called_as.set(" ".join(("stepfleet", str(self.name), *part)))
        if not gc.isenabled():
            gc.freeze()  # what modules have made stays
            gc.enable()
        return command.make_context(info_name, args, parent, **extra)


class Commands(TyperGroup):
    """All commands, under their headings."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        for heading, commands in [*GROUPS.items(), (None, OLD_WORDS)]:
            for name, (module, line) in commands.items():
                self.add_command(Command(name, module, line, heading))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the arguments after the options."""
        for one in self.get_params(ctx):  # all are flags; Typer imports pydantic to convert None
            one.default = one.default or False
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first argument names; suggests none that is not listed."""
        if args and args[0] == "bench":
            ctx.fail("'bench' has left the command line: python benchmarks/bench.py")
        if args and args[0] not in self.commands:
            self.commands = {name: one for name, one in self.commands.items() if not one.hidden}
        return super().resolve_command(ctx, args)


def build() -> typer.Typer:
    """Return the application with all commands."""
    app = typer.Typer(
        name="stepfleet",
        cls=Commands,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings=_HELP,
        result_callback=_end,
        epilog="Exit codes: 0 all completed, 1 some runs failed, 2 usage or set-up error, "
        "130 interrupted.",
    )
    app.callback()(_options)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from stepfleet.orchestrator.version import own_build  # noqa: PLC0415 - for this option only

        typer.echo(own_build())
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
    gc.disable()  # a tenth of all imports; `Command` enables it again
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
        from stepfleet.orchestrator.cli.terminal import shown  # noqa: PLC0415 - seldom

        return shown(in_cli_words(str(error)))  # it may quote what a model has written
    if isinstance(error, ExceptionGroup):
        messages = [_message(one) for one in error.exceptions]
        return messages[0] if messages and all(messages) else None
    return None


def in_cli_words(message: str) -> str:
    """Return an error's message with the options that do what its arguments would."""
    for pattern, option in _WORDS:
        message = pattern.sub(option, message)
    return message
