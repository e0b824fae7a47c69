"""`stepfleet run`, `submit`, `then`, `status`, `watch`, `failures`, `results`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from stepfleet.orchestrator.cli import options

_INPUTS = "Inputs: JSONL, CSV, TSV, Parquet or a JSON array."
InputFile = Annotated[Path, typer.Argument(metavar="FILE", help=_INPUTS)]


def run(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help=_INPUTS)] = None,
    *,
    agents: options.AgentsRef,
    agent: options.AgentName = None,
    out: options.Out = None,
    workers: options.RunWorkers = 1,
    slots: options.Slots = None,
    simulate: options.Simulate = None,
    simulate_latency: options.SimulateLatency = None,
    simulate_faults: options.SimulateFaults = None,
    data: options.Data = options.DATA_FOLDER,
    skip_invalid: options.SkipInvalid = False,
    input_format: options.InputKind = None,
    input_field: options.InputField = None,
    id_field: options.IdField = None,
    only_new: options.OnlyNew = False,
    tenant: options.Tenant = None,
    priority: options.BatchPriority = None,
    limit: options.BatchLimit = None,
    output_format: options.OutFormat = "auto",
    fields: options.Fields = None,
    slim: options.Slim = False,
    ordered: options.Ordered = False,
    json: options.Json = False,
    again: options.Again = False,
    no_check: options.NoCheck = False,
    retry_failed: options.RetryFailed = False,
    raised: options.Raised = None,
    batch: options.GoOnWith = None,
) -> int:
    """Run a file of inputs: Redis, workers, progress and results, all in one command.

    Uses the Redis in STEPFLEET_REDIS_URL, or a private one. One file is one batch: Ctrl-C pauses,
    the same command goes on.
    """
    from stepfleet.orchestrator.cli.local.fleet import FleetPlan
    from stepfleet.orchestrator.cli.results.input_file import InputForm
    from stepfleet.orchestrator.cli.results.layout import ResultOptions
    from stepfleet.orchestrator.cli.run.plan import RunPlan
    from stepfleet.orchestrator.cli.run.run import run_file

    fleet = FleetPlan(agents, workers, slots)
    plan = RunPlan(
        file=file,
        input_name=str(file),
        batch_id=batch,
        agent=agent,
        fleet=fleet.simulating(simulate, simulate_latency, simulate_faults),
        results=ResultOptions(out, output_format, fields, slim, ordered),
        data=data,
        skip_invalid=skip_invalid,
        json=json,
        again=again,
        check=not no_check,
        retry_failed=retry_failed,
        raised=tuple(raised or ()),
        form=InputForm(input_format, input_field, id_field, only_new, tenant, priority, limit),
    )
    return run_file(plan)


def ask(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="The agent's name.")],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The question; - reads stdin.")],
    *,
    agents: options.MaybeAgentsRef = None,
    simulate: options.Simulate = None,
    simulate_latency: options.SimulateLatency = None,
    simulate_faults: options.SimulateFaults = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Ask an agent one question, and print its answer: text while it is written on a terminal.

    Uses the workers of the Redis in STEPFLEET_REDIS_URL; without it, --agents names the agent's
    module, and a private Redis and a worker are started. Exit code 1: the run did not complete.
    """
    from stepfleet.orchestrator.cli.local.fleet import FleetPlan
    from stepfleet.orchestrator.cli.run.ask import Question, ask_agent, plan_for
    from stepfleet.orchestrator.cli.views.control import standard_input

    fleet = FleetPlan(agents or "", 1).simulating(simulate, simulate_latency, simulate_faults)
    plan = plan_for(agents, fleet, data)
    question = standard_input() if text == "-" else text
    return ask_agent(Question(agent, question, plan, data, json))


def submit(
    file: InputFile,
    *,
    agent: options.AgentName = None,
    agents: options.MaybeAgentsRef = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the batch to its end.")] = False,
    out: options.Out = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option("--idempotency-key", help="The same key returns the same batch again."),
    ] = None,
    skip_invalid: options.SkipInvalid = False,
    input_format: options.InputKind = None,
    input_field: options.InputField = None,
    id_field: options.IdField = None,
    only_new: options.OnlyNew = False,
    tenant: options.Tenant = None,
    priority: options.BatchPriority = None,
    limit: options.BatchLimit = None,
    after: Annotated[
        list[str] | None,
        typer.Option("--after", metavar="RUN", help="Begin when this run has ended; repeatable."),
    ] = None,
    output_format: options.OutFormat = "auto",
    fields: options.Fields = None,
    slim: options.Slim = False,
    ordered: options.Ordered = False,
    json: options.Json = False,
    again: options.Again = False,
    no_check: options.NoCheck = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Submit a file of inputs to a fleet, and print the batch's id.

    A file that was submitted with the same agents has its batch: only --again makes another one.
    """
    from stepfleet.orchestrator.cli.results.input_file import InputForm
    from stepfleet.orchestrator.cli.results.layout import ResultOptions
    from stepfleet.orchestrator.cli.run.batches import submit_file

    return submit_file(
        file,
        data,
        form=InputForm(
            input_format, input_field, id_field, only_new, tenant, priority, limit, after
        ),
        agents=agents,
        agent=agent,
        results=ResultOptions(out, output_format, fields, slim, ordered),
        wait=wait,
        idempotency_key=idempotency_key,
        skip_invalid=skip_invalid,
        json=json,
        again=again,
        check=not no_check,
    )


def then(
    batch: options.BatchId,
    *,
    agent: options.AgentName = None,
    agents: options.MaybeAgentsRef = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="TEXT",
            help="With {output}, {input}, {id} of a run; of pages {outputs}, {count}.",
        ),
    ] = None,
    page: Annotated[
        int | None, typer.Option("--page", help="Rows of the batch for each run; without it, one.")
    ] = None,
    until_one: Annotated[
        bool, typer.Option("--until-one", help="Take pages of results until one run is left.")
    ] = False,
    after_failed: Annotated[
        str,
        typer.Option(
            "--after-failed", metavar="[skip|stop]", help="Leave failed runs out, or begin nothing."
        ),
    ] = "skip",
    name: Annotated[str | None, typer.Option("--name", help="The new batch's name.")] = None,
    tenant: options.Tenant = None,
    priority: options.BatchPriority = None,
    raised: options.Raised = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Have another batch work on a batch's results when that has ended, and print its id."""
    from stepfleet.orchestrator.cli.run.follow_up import follow_batch
    from stepfleet.orchestrator.cli.views.control import overrides_of

    given = {"page": page, "until_one": until_one, "after_failed": after_failed}
    given |= {"name": name, "tenant": tenant, "priority": priority, **overrides_of(raised or [])}
    return follow_batch(batch, text, data, agent=agent, agents=agents, options=given, json=json)


def status(
    batch: Annotated[str | None, typer.Argument(metavar="[ID]", help="A batch id.")] = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Show a batch, or the fleet and its newest batches."""
    from stepfleet.orchestrator.cli.setup.with_fleet import show
    from stepfleet.orchestrator.cli.views import batches, failures, fleet

    if batch is None:
        show(data, fleet.read, fleet.picture, json=json, as_data=fleet.as_data)
        return

    show(
        data,
        partial(failures.read_status, batch),
        lambda found: batches.summary(*found),
        json=json,
        as_data=lambda found: failures.with_causes(*found),
    )


def watch(
    batch: options.BatchId,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Show a batch's progress until it has ended."""
    from stepfleet.orchestrator.cli.run.batches import watch_batch

    return watch_batch(batch, data, json=json)


def failures(
    batch: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="A batch id; else the newest runs.")
    ] = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Group runs that did not complete by cause: a batch's, with the command that retries each.

    Without a batch up to 500 failed and 500 stopped runs of the fleet: the newest ones.
    """
    from stepfleet.orchestrator.cli.views.failures import show_failures

    return show_failures(batch, data, json=json)


def results(
    batch: options.BatchId,
    *,
    out: options.Out = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only runs that did not complete.")] = (
        False
    ),
    ordered: options.Ordered = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until all runs have ended.")] = False,
    output_format: options.OutFormat = "auto",
    fields: options.Fields = None,
    slim: options.Slim = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Write the results of a batch to the screen or a file, which is replaced as a whole."""
    from stepfleet.orchestrator.cli.results.layout import STDOUT, ResultOptions
    from stepfleet.orchestrator.cli.run.batches import write_results

    out = None if out == STDOUT else out
    written = ResultOptions(out, output_format, fields, slim, ordered)
    return write_results(batch, data, written, failed=failed, wait=wait)
