"""What a `run` command was given, the checks of it, and the commands that its messages name."""

import hashlib
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path

from stepfleet.orchestrator.cli.local.fleet import FleetPlan
from stepfleet.orchestrator.cli.options import data_option
from stepfleet.orchestrator.cli.results.input_file import InputForm
from stepfleet.orchestrator.cli.results.layout import ResultOptions
from stepfleet.orchestrator.cli.results.places import check_writable
from stepfleet.orchestrator.cli.run.notes import Note
from stepfleet.orchestrator.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The arguments of `run`: a file, or the id of a batch to go on with.

    `input_name` is the file as it was named; `file` may be a copy of standard input.
    """

    file: Path | None
    input_name: str
    batch_id: str | None
    agent: str | None
    fleet: FleetPlan
    results: ResultOptions
    data: Path
    skip_invalid: bool
    json: bool
    again: bool = False
    check: bool = True
    retry_failed: bool = False
    raised: tuple[str, ...] = ()
    form: InputForm = field(default_factory=InputForm)

    @property
    def from_stdin(self) -> bool:
        """Whether the inputs come from standard input."""
        return self.input_name == "-"

    @property
    def out(self) -> Path | None:
        """The results file."""
        return self.results.out


def check_options(plan: RunPlan) -> None:
    """Raise `ConfigurationError` for options that contradict each other. Pure."""
    plan.results.check()
    if (plan.file is None) == (plan.batch_id is None):
        raise ConfigurationError("name a FILE of inputs, or --batch ID to go on with a batch")
    if plan.form.only_new and (plan.again or plan.batch_id or plan.from_stdin):
        msg = "--only-new adds to the batch of a FILE; leave --again, --batch and '-' out"
        raise ConfigurationError(msg)
    if plan.again and (plan.retry_failed or plan.batch_id):
        other = "--retry-failed" if plan.retry_failed else "--batch"
        msg = f"--again begins a new batch, {other} goes on with one; leave one of them out"
        raise ConfigurationError(msg)
    if plan.raised and not plan.retry_failed:
        raise ConfigurationError("--raise needs --retry-failed: it changes the limits of retries")


def of_file(plan: RunPlan) -> str:
    """Return the name of the note of the file's newest batch; empty for standard input."""
    if plan.file is None or plan.from_stdin:
        return ""
    simulate = plan.fleet.simulate
    parts = (str(plan.file.resolve()), plan.agent, simulate and simulate.rules)
    return f"file-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"


def is_run_by(batch_id: str) -> tuple[str, str]:
    """Return what another command does that works on the same batch, and the fix."""
    if not batch_id:
        return "is about to run the same file", "Wait a moment and repeat the command"
    data = data_option()
    fix = (
        f"Watch it: stepfleet watch {batch_id}{data}. Its results, also before it has ended: "
        f"stepfleet results {batch_id} --out FILE{data}. A second batch, paid again: --again"
    )
    return f"already runs batch {batch_id} of this file", fix


def with_out(plan: RunPlan, note: Note | None) -> RunPlan:
    """Return the plan with the results file of its earlier command, where it names none.

    The file keeps its form where the plan names none. Raises `ConfigurationError` for another
    file than that.
    """
    if note is None or not note.out or plan.again:
        return plan
    if plan.out is None or plan.out.absolute() == Path(note.out):
        check_writable(Path(note.out))
        form = plan.results.form or note.results
        return replace(plan, results=ResultOptions(plan.out or Path(note.out), **form))
    if plan.batch_id:
        return plan
    msg = (
        f"batch {note.batch_id} runs this file, with --out {note.out}: leave --out out to go on "
        f"with it. Its results in another file: stepfleet results {note.batch_id} --out "
        f"{shlex.quote(str(plan.out))}{data_option()}. A second batch, paid again: --again"
    )
    raise ConfigurationError(msg)


def command_of(plan: RunPlan, *target: str) -> str:
    """Return the command that goes on with a `target`: `--batch ID`, or a file."""
    fleet = plan.fleet
    words = ["stepfleet", "run", *target, "--agents", fleet.agents]
    if fleet.workers != 1:
        words += ["--workers", str(fleet.workers)]
    if fleet.slots is not None:
        words += ["--slots", str(fleet.slots)]
    if fleet.simulate is not None:
        words += fleet.simulate.options
    if plan.out is not None:
        words += ["--out", str(plan.out), *plan.results.words]
    return shlex.join(words) + data_option()
