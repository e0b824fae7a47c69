from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from stepfleet.orchestrator import Agent, ConfigurationError
from stepfleet.orchestrator.batches.files.source import open_input
from stepfleet.orchestrator.cli.inputs import configs_used, default_agent, digest_of

SOLVER = Agent("solver", model="openai:m")
WRITER = Agent("writer", model="openai:m")
BOTH = {"solver": SOLVER, "writer": WRITER}


def names(
    lines: Sequence[bytes | None], agents: Mapping[str, Agent], default: str | None = None
) -> list[str]:
    return [config.name for config in configs_used(lines, agents, default)]


def test_the_only_agent_is_the_default() -> None:
    assert default_agent({"solver": SOLVER}, None) == "solver"
    assert default_agent(BOTH, None) is None
    assert default_agent(BOTH, "writer") == "writer"


def test_an_agent_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigurationError, match="has solver, writer"):
        default_agent(BOTH, "painter")


def test_only_agents_that_lines_ask_for_count_as_used() -> None:
    lines = [b'{"input": "x"}', b'{"input": "y", "agent": "writer"}', b"not json", None]

    assert names(lines, BOTH) == ["writer"]
    assert names(lines, BOTH, default="solver") == ["solver", "writer"]


def test_openai_lines_without_an_agent_use_the_plain_one() -> None:
    assert names([b'{"custom_id": "1", "body": {}}'], BOTH) == ["openai-batch"]


def test_the_digest_follows_the_content(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text('{"input": "x"}\n')
    two.write_text('{"input": "y"}\n')

    with open_input(one) as first, open_input(one) as again, open_input(two) as other:
        assert digest_of(first) == digest_of(again)
        assert digest_of(first) != digest_of(other)
