"""`stepfleet submit`, `status`, `watch`, `results`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

from pathlib import Path
from typing import Annotated

import typer

from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.terminal import exit_codes


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (submit, status, watch, results):
        app.command()(command)


def submit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Inputs, JSONL: a run per line.")],
    *,
    agent: options.AgentName = None,
    agents: options.MaybeAgentsRef = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the batch to its end.")] = False,
    out: options.Out = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option("--idempotency-key", help="The same key again is the same batch again."),
    ] = None,
    skip_invalid: options.SkipInvalid = False,
    output_format: options.OutFormat = "auto",
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Submit a file of inputs to a fleet; prints the batch's id."""
    from stepfleet.orchestrator.cli.views.batches import Submission, submit_file

    asked = Submission(
        file=file,
        agent=agent,
        agents=agents,
        data=data,
        out=out,
        wait=wait,
        idempotency_key=idempotency_key,
        skip_invalid=skip_invalid,
        output_format=output_format,
        json=json,
    )
    exit_codes.end(submit_file(asked))


def status(
    batch: Annotated[str | None, typer.Argument(metavar="[ID]", help="A batch id.")] = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Show a batch, or the fleet and its newest batches."""
    from stepfleet.orchestrator.cli.views.batches import show_status

    show_status(batch, data, json=json)


def watch(
    batch: options.BatchId,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Show a batch's progress until it has ended."""
    from stepfleet.orchestrator.cli.views.batches import watch_batch

    exit_codes.end(watch_batch(batch, data, json=json))


def results(
    batch: options.BatchId,
    out: options.Out = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only what did not complete.")] = False,
    ordered: Annotated[bool, typer.Option("--ordered", help="In input order.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Until all runs have ended.")] = False,
    output_format: options.OutFormat = "auto",
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Write the results of a batch as JSON lines, to a file (replaced as a whole) or the screen."""
    from stepfleet.orchestrator.cli.views.batches import write_results

    code = write_results(
        batch, data, out, failed=failed, ordered=ordered, wait=wait, output_format=output_format
    )
    exit_codes.end(code)
