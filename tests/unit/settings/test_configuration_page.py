"""docs/configuration.md lists what there is, and its samples run."""

import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from stepfleet.orchestrator import (
    AgentBuilder,
    AgentConfig,
    BroadcastConfig,
    CachePolicy,
    ErrorPolicy,
    MemoryPolicy,
    ModelSettings,
    Planning,
    Settings,
)
from stepfleet.orchestrator.agents.agent import CODE, POLICIES
from stepfleet.orchestrator.agents.config import NOT_PER_RUN
from stepfleet.orchestrator.cli.doctor import OTHER_VARIABLES
from stepfleet.orchestrator.cli.main import Command, build

PAGE = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    (found,) = re.findall(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def samples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.+?)```", PAGE, re.DOTALL)


def shown(default: Any) -> str:
    if isinstance(default, BaseModel):
        return "below"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, Enum):
        return str(default.value)
    if isinstance(default, float):
        return f"{default:g}"
    if default is None:
        return "none"
    return str(default) if default or default == 0 else "empty"


def rows(record: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for name, field in record.model_fields.items():
        default = field.get_default(call_default_factory=True)
        yield name, "required" if field.is_required() else shown(default)


def variables_of(command: Any) -> Iterator[str]:
    """Yield the variables of a command's options, and of those below it."""
    for option in command.params:
        yield from [option.envvar] if isinstance(option.envvar, str) else option.envvar or []
    for below in getattr(command, "commands", {}).values():
        yield from variables_of(below.load() if isinstance(below, Command) else below)


@pytest.mark.parametrize(
    ("heading", "record"),
    [
        ("Settings of the fleet", Settings),
        ("Fields of an agent", AgentConfig),
        ("settings", ModelSettings),
        ("memory", MemoryPolicy),
        ("cache", CachePolicy),
        ("error_policy", ErrorPolicy),
        ("broadcast", BroadcastConfig),
        ("planning", Planning),
    ],
)
def test_the_page_has_every_field_with_its_default(heading: str, record: type[BaseModel]) -> None:
    """CONF-05, CONF-10: a new field needs its row in docs/configuration.md."""
    told = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section(heading), re.MULTILINE)
    assert dict(told) == dict(rows(record))


def test_the_page_names_every_method_preset_and_reference() -> None:
    """CONF-02, CONF-10"""
    methods = {name for name in vars(AgentBuilder) if name.startswith("with")}
    assert methods == set(re.findall(r"`(with\w*)`", section("An agent in code")))
    assert set(POLICIES) <= set(re.findall(r"`(\w+)`", section("error_policy")))
    assert set(BroadcastConfig.PRESETS) <= set(re.findall(r"`(\w+)`", section("broadcast")))
    assert set(CODE) <= set(re.findall(r"`(\w+)`", section("An agent in a file")))
    fixed = {name.removeprefix("settings.") for name in NOT_PER_RUN}
    assert fixed <= set(re.findall(r"`([\w.]+)`", section("Changes for one run")))


def test_the_page_has_every_variable_that_is_no_setting() -> None:
    """CONF-05, CONF-10"""
    told = re.findall(r"`(STEPFLEET_\w+)`", section("Other variables"))
    assert set(told) == set(OTHER_VARIABLES)
    assert {*variables_of(typer.main.get_command(build()))} <= {*told}


def test_the_pages_samples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CONF-02, CONF-05, LLM-03: code over the environment over the file."""
    monkeypatch.chdir(tmp_path)
    (file,), (variables,) = samples("toml"), samples("sh")
    (tmp_path / "stepfleet.toml").write_text(file)
    for name, value in re.findall(r"^export (\w+)='?([^'\n]*)'?$", variables, re.MULTILINE):
        monkeypatch.setenv(name, value)
    names: dict[str, Any] = {}
    for sample in samples("python"):
        exec(sample, names)  # noqa: S102 - the page's own sample
    assert names["brief"].config.max_steps == names["solver"].config.max_steps == 8
    assert names["costly"].config.model_attempts == 8
    assert capsys.readouterr().out == "12 100000 0.7\n"
    assert "calculator" in names["agent"].tools
    assert names["agent"].config.time_limit is None
