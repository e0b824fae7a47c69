import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.agents.loader import load_agents

SOLVER = "from stepfleet.orchestrator import Agent\nsolver = Agent('solver', model='openai:m')\n"


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_agents_of_a_file_are_found_by_their_names(tmp_path: Path) -> None:
    assert set(load_agents(write(tmp_path, "mine.py", SOLVER))) == {"solver"}


def test_agents_of_a_module_in_the_working_directory_are_found(tmp_path: Path) -> None:
    write(tmp_path, "my_agents_here.py", SOLVER)

    assert set(load_agents("my_agents_here")) == {"solver"}


def test_agents_in_lists_and_dicts_count_as_well(tmp_path: Path) -> None:
    text = (
        SOLVER
        + "team = [Agent('a', model='openai:m')]\nmore = {'b': Agent('b', model='openai:m')}\n"
    )

    assert set(load_agents(write(tmp_path, "team.py", text))) == {"solver", "a", "b"}


def test_several_references_are_put_together(tmp_path: Path) -> None:
    one = write(tmp_path, "one.py", SOLVER)
    two = write(tmp_path, "two.py", SOLVER.replace("'solver'", "'writer'"))

    assert set(load_agents(f"{one}, {two}")) == {"solver", "writer"}
    assert set(load_agents([one, two])) == {"solver", "writer"}


def test_a_file_beside_the_agents_can_be_imported_by_them(tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    write(folder, "prompts_beside.py", "TEXT = 'hello'\n")
    path = write(folder, "a.py", "from prompts_beside import TEXT\n" + SOLVER)

    assert load_agents(path)


def test_loading_a_file_twice_gives_the_same_agents(tmp_path: Path) -> None:
    path = write(tmp_path, "mine.py", SOLVER)

    assert load_agents(path)["solver"] is load_agents(path)["solver"]


def test_a_file_named_like_a_standard_module_does_not_replace_it(tmp_path: Path) -> None:
    load_agents(write(tmp_path, "json.py", SOLVER))
    import json  # noqa: PLC0415 - it is the subject

    assert json.loads("1") == 1


def test_an_error_in_the_file_is_reported_with_file_line_and_exception(tmp_path: Path) -> None:
    path = write(tmp_path, "broken.py", "x = 1\ny = undefined_name\n")

    with pytest.raises(ConfigurationError, match=r"broken\.py, line 2: NameError: name 'undefined"):
        load_agents(path)


def test_an_error_in_a_module_is_reported_with_file_line_and_exception(tmp_path: Path) -> None:
    write(tmp_path, "broken_module_here.py", "x = 1\n\nraise KeyError('a')\n")

    with pytest.raises(ConfigurationError, match=r"broken_module_here\.py, line 3: KeyError"):
        load_agents("broken_module_here")


def test_a_syntax_error_is_reported_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "typo.py", "x = 1\ndef f(:\n")

    with pytest.raises(ConfigurationError, match=r"typo\.py, line 2: SyntaxError"):
        load_agents(path)


def test_a_tool_without_type_hints_is_reported_with_the_line_of_its_decorator(
    tmp_path: Path,
) -> None:
    text = "from stepfleet.orchestrator.tools import tool\n\n@tool\ndef add(a, b):\n    'Add.'\n"

    with pytest.raises(ConfigurationError, match=r"tools_without\.py, line [34]: .*hint"):
        load_agents(write(tmp_path, "tools_without.py", text))


def test_a_file_that_ends_the_interpreter_does_not_end_ours(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="SystemExit"):
        load_agents(write(tmp_path, "leaver.py", "raise SystemExit(3)\n"))


def test_a_dependency_that_is_missing_is_not_mistaken_for_the_module_itself(tmp_path: Path) -> None:
    write(tmp_path, "needs_more.py", "import surely_not_installed_here\n")

    with pytest.raises(ConfigurationError, match=r"needs_more\.py, line 1: ModuleNotFoundError"):
        load_agents("needs_more")


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("nowhere.py", "no such file"),
        ("no_such_module_at_all", "there is no module"),
        (" ", "is empty"),
    ],
)
def test_a_reference_to_nothing_is_refused(reference: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        load_agents(reference)


def test_a_file_without_agents_is_refused_with_an_example(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no agent there; assign one"):
        load_agents(write(tmp_path, "empty.py", "x = 1\n"))


def test_two_agents_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="two agents are named 'solver'"):
        load_agents(write(tmp_path, "twice.py", SOLVER + SOLVER.replace("solver =", "other =")))


DJANGO_APP = Path(__file__).parents[3] / "examples" / "django_app"
LOADED = (
    "from stepfleet.orchestrator.agents.loader import load_agents\n"
    "print(sorted(load_agents('shop.agents')))"
)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("shop.settings", "['clerk']"),
        ("shop.nowhere", "DJANGO_SETTINGS_MODULE=shop.nowhere: ModuleNotFoundError"),
    ],
)
def test_agents_that_import_a_django_projects_models_are_found_in_any_process(
    settings: str, said: str
) -> None:
    """Isolated processes and commands import them without Celery's own set-up of Django."""
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": settings}
    found = subprocess.run(
        [sys.executable, "-c", LOADED],
        cwd=DJANGO_APP,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert said in found.stdout + found.stderr
