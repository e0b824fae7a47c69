"""`stepfleet approvals`, `approve`, `deny`, `answer`."""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs: `--help` answers at once

from collections.abc import Callable
from typing import Annotated

import typer

from stepfleet.orchestrator.cli import options

Run = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN[:CALL]]",
        help="A run id, or a line's id in --batch or a new batch; with the call if it has several.",
    ),
]
Batch = Annotated[
    str | None,
    typer.Option("--batch", "-b", help="All calls of this batch; with RUN the batch of that line."),
]
Agent = Annotated[str | None, typer.Option("--agent", help="Only calls of runs of this agent.")]
Tool = Annotated[str | None, typer.Option("--tool", help="Only calls of this tool.")]
Tenant = Annotated[str | None, typer.Option("--tenant", help="Only runs of this tenant.")]
Group = Annotated[
    str | None, typer.Option("--group", help="Only these equal calls, as `approvals` lists them.")
]
Key = Annotated[
    str | None, typer.Option("--key", help="Only this call, as `approvals --json` lists it.")
]
By = Annotated[str, typer.Option("--by", help="Who decides; you by default.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Decide many calls without a question.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; the model reads it.")]


def approvals(
    batch: Annotated[
        str | None, typer.Option("--batch", "-b", help="Only calls of this batch.")
    ] = None,
    agent: Agent = None,
    tool: Tool = None,
    tenant: Tenant = None,
    group: Group = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """List the calls that wait for a person: equal ones together, the oldest first."""
    from stepfleet.orchestrator.cli.views.approvals import conditions, show_waiting

    which = conditions(batch=batch, agent=agent, tool=tool, tenant=tenant, group=group)
    show_waiting(which, data, json=json)


def _decider(name: str, text: str, *, approve: bool, kind: str | None) -> Callable[..., int]:
    """Return the command `name` that decides calls of that `kind` so, with `text` as its help."""

    def command(
        run: Run = None,
        *,
        batch: Batch = None,
        agent: Agent = None,
        tool: Tool = None,
        tenant: Tenant = None,
        group: Group = None,
        key: Key = None,
        reason: Reason = "",
        by: By = "",
        yes: Yes = False,
        json: options.Json = False,
        data: options.Data = options.DATA_FOLDER,
    ) -> int:
        from stepfleet.orchestrator.cli.views.approvals import Choice, conditions, decide

        which = conditions(
            batch=batch, agent=agent, tool=tool, tenant=tenant, group=group, key=key, kind=kind
        )
        choice = Choice(approve=approve, reason=reason, by=by)
        return decide(run, which, choice, data, json=json, sure=yes)

    command.__name__, command.__doc__ = name, text
    return command


approve = _decider(
    "approve",
    "Approve a call that waits, or all that the options name: it is made then.",
    approve=True,
    kind="approval",
)
deny = _decider(
    "deny",
    "Deny a call that waits, or all that the options name: the model reads the reason.",
    approve=False,
    kind=None,
)


def answer(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[:CALL]",
            help="The run that asks, or its line's id; with the call if several.",
        ),
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The answer; - reads stdin.")],
    batch: options.BatchOfLine = None,
    key: Key = None,
    by: By = "",
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Answer the question that a run asks by its tool ask_person."""
    from stepfleet.orchestrator.cli.views.approvals import Choice, conditions, decide, text_of

    choice = Choice(approve=True, by=by, answer=text_of(text))
    which = conditions(batch=batch, key=key, kind="question")
    return decide(run, which, choice, data, json=json, sure=True)
