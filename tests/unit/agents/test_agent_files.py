"""Agents from a TOML file, the environment over it, and code over both."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepfleet.orchestrator import ConfigurationError, ErrorPolicy, agents_of_file, builder_of
from stepfleet.orchestrator.agents.loader import load_agents

FILE = """
redis_url = "redis://elsewhere:6379/0"

[agents.solver]
model = "openai:gpt-4o-mini"
instructions = "Solve it."
tools = ["file_tools:look"]
max_steps = 8
time_limit = "none"
error_policy = "retry_tool_errors"
broadcast = "standard"
output_type = "file_tools:Answer"
criteria = ["file_tools:never"]

[agents.solver.settings]
temperature = 0.2
max_tokens = 300

[agents."old clerk"]
model = "openai:m"
error_policy = { preset = "retry_all", max_retries = 2 }
output_type = { type = "object", properties = { usd = { type = "number" } } }
"""
TOOLS = '''
from pydantic import BaseModel
from stepfleet.orchestrator import tool, when


@tool(read_only=True)
def look(what: str) -> str:
    """Look something up."""
    return what


class Answer(BaseModel):
    text: str


never = when(lambda state: None)
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "file_tools.py").write_text(TOOLS)
    path = tmp_path / "stepfleet.toml"
    path.write_text(FILE)
    before = set(sys.modules)
    yield path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_describes_agents(file: Path) -> None:
    """CONF-05: values, presets, and code by reference."""
    agents = agents_of_file(file, {})
    assert set(agents) == {"solver", "old clerk"}
    solver = agents["solver"]
    assert (solver.config.max_steps, solver.config.time_limit) == (8, None)
    assert solver.config.error_policy == ErrorPolicy.retry_tool_errors()
    assert solver.config.broadcast.include_stream_chunks
    assert solver.config.settings.temperature == 0.2
    assert "look" in solver.tools
    assert solver.config.output_schema is not None
    assert solver.config.output_schema["title"] == "Answer"
    assert len(solver.criteria) == 1
    assert agents["old clerk"].config.error_policy == ErrorPolicy.retry_all(2)
    assert agents["old clerk"].config.demands_answer


def test_workers_and_commands_load_a_file_as_they_load_modules(file: Path) -> None:
    """CONF-05"""
    assert set(load_agents(str(file))) == {"solver", "old clerk"}


def test_code_wins_over_the_environment_and_that_over_the_file(file: Path) -> None:
    """CONF-05: three ways to set one thing, and the default under them."""
    said = {"STEPFLEET_AGENT__SOLVER__MAX_STEPS": "12"}
    assert builder_of("solver", None, {}).with_model("openai:m").build().config.max_steps == 10
    assert builder_of("solver", file, {}).build().config.max_steps == 8
    assert builder_of("solver", file, said).build().config.max_steps == 12
    assert builder_of("solver", file, said).with_max_iterations(3).build().config.max_steps == 3


def test_tables_are_put_together_field_by_field(file: Path) -> None:
    """CONF-05"""
    said = {"STEPFLEET_AGENT__SOLVER__SETTINGS__TEMPERATURE": "1"}
    config = builder_of("solver", file, said).with_settings(seed=7).build().config
    settings = config.settings
    assert (settings.temperature, settings.max_tokens, settings.seed) == (1, 300, 7)


def test_the_environment_gives_text_json_and_none() -> None:
    """CONF-05, CONF-06: the model's address among them."""
    said = {
        "STEPFLEET_AGENT__OLD_CLERK__MODEL": "openai:m",
        "STEPFLEET_AGENT__OLD_CLERK__TOKEN_LIMIT": "none",
        "STEPFLEET_AGENT__OLD_CLERK__PARALLEL_TOOL_EXECUTION": "true",
        "STEPFLEET_AGENT__OLD_CLERK__FINISH_REASONS": '["length"]',
        "STEPFLEET_AGENT__OLD_CLERK__SETTINGS__BASE_URL": "https://models.example/v1",
        "STEPFLEET_AGENT__OLD_CLERK__ERROR_POLICY": "ignore_tool_errors",
        "STEPFLEET_AGENT__OTHER__MAX_STEPS": "99",
    }
    config = builder_of("old clerk", None, said).build().config
    assert (config.token_limit, config.parallel_tool_execution) == (None, True)
    assert (config.finish_reasons, config.max_steps) == (("length",), 10)
    assert config.settings.base_url == "https://models.example/v1"
    assert config.error_policy == ErrorPolicy.ignore_tool_errors()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[agents.a]\nmodel = 'openai:m'\nmax_steps = -1", "agents.toml: agent 'a': field 'max_st"),
        ("[agents.a]\nmax_steps = 1", "'model' is missing"),
        ("[agents.a]\nmodel = 'openai:m'\nmax_step = 1", "'max_step' is not known"),
        ("[agents.a]\nmodel = 'openai:m'\ntools = ['no_such:tool']", "no_such"),
        ("[agents.a]\nmodel = 'openai:m'\ncriteria = 3", "'criteria' names code"),
        ("[agents.a]\nmodel = 'openai:m'\ncriteria = 'no_such:one'", "field 'criteria': 'no_such"),
        ("[agents.a]\nmodel = 'openai:m'\nerror_policy = 'x'", "'x' is not a preset"),
        ("[agents]\na = 1", "holds tables alone"),
        ("[other]\na = 1", "no agent there"),
        ("[agents", "not valid TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_reported_with_the_file(
    tmp_path: Path, text: str, said: str
) -> None:
    """CONF-04"""
    with pytest.raises(ConfigurationError, match=said) as raised:
        agents_of_file(write(tmp_path / "agents.toml", text), {})
    assert "agents.toml" in str(raised.value)


def test_a_file_or_a_table_that_is_not_there_is_reported(tmp_path: Path) -> None:
    """CONF-04"""
    with pytest.raises(ConfigurationError, match=r"none\.toml: No such file"):
        agents_of_file(tmp_path / "none.toml")
    there = write(tmp_path / "agents.toml", "[agents.a]\nmodel = 'openai:m'")
    with pytest.raises(ConfigurationError, match=r"no table \[agents.b\]; agents there: a"):
        builder_of("b", there, {})


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("STEPFLEET_AGENT__A__MAX_STEP", "1", "no field 'max_step'"),
        ("STEPFLEET_AGENT__A__FINISH_REASONS", "[length", "is not valid JSON"),
    ],
)
def test_what_is_wrong_in_the_environment_is_reported_with_the_variable(
    variable: str, value: str, said: str
) -> None:
    """CONF-04"""
    with pytest.raises(ConfigurationError, match=f"^{variable}.*{said}"):
        builder_of("a", None, {variable: value})
