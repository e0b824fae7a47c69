"""Messages of the library in the words of the command line."""

from contextvars import copy_context
from pathlib import Path

import pytest

from stepfleet.orchestrator.cli.main import in_cli_words
from stepfleet.orchestrator.cli.options import data_option, of_data_folder


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("raise it: retry with max_steps=8", "raise it: --raise max_steps=8"),
        ("raise it: fork with max_steps=8", "raise it: --set max_steps=8"),
        ("(skip_invalid=True submits the others)", "(--skip-invalid submits the others)"),
        ("fork it before that (at=3), or", "fork it before that (--at 3), or"),
        ("or for the whole batch with agent=...", "or for all lines with --agent NAME"),
        ("which pages have: give page=N, the", "which pages have: give --page N, the"),
        (
            "choose another id (uuid.uuid4()) for this one",
            "restore a copy with an id of its own: --as-new",
        ),
        ("retry it with care", "retry it with care"),
    ],
)
def test_arguments_are_named_as_options(given: str, shown: str) -> None:
    assert in_cli_words(given) == shown


def test_commands_that_are_printed_name_the_data_folder_unless_it_is_the_default() -> None:
    def told(folder: str) -> str:
        of_data_folder(Path(folder))
        return data_option()

    found = [copy_context().run(told, one) for one in (".stepfleet", "my data")]
    assert [*found, data_option()] == ["", " --data 'my data'", ""]
