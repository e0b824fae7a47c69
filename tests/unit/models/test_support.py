"""The table of what each provider takes: asked by users, kept at the door, shown on the page."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from support.runs.agent_records import a_state

from stepfleet.orchestrator import Agent, Message, ModelRequest, supports, tool
from stepfleet.orchestrator.agents.agent import contract_of
from stepfleet.orchestrator.agents.config import AgentConfig, stored_overrides
from stepfleet.orchestrator.batches.check import Plan
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models.support import check_messages
from stepfleet.orchestrator.store.runs.submission import Submission

PAGE = (Path(__file__).parents[3] / "docs" / "providers.md").read_text(encoding="utf-8")
AUDIO = {"audio": {"format": "wav", "source": {"bytes": "UklGRg=="}}}
GIF = {"image": {"format": "gif", "source": {"bytes": "R0lG"}}}
LINKED = {"document": {"source": {"url": "https://x/a.pdf"}}}
COLUMNS = {
    "chat completions": "openai:x",
    "responses": "openai-responses:x",
    "messages": "anthropic:x",
    "generateContent": "google:x",
    "Converse": "bedrock:anthropic.claude-opus-5",
}


@pytest.mark.parametrize(
    ("model", "block", "problem"),
    [
        ("anthropic:c", AUDIO, "takes no audio (audio/wav, base64 data): it takes document, image"),
        ("openai-responses:o", AUDIO, "takes no audio"),
        ("google:gemini-3-pro", GIF, "takes no image (image/gif, base64 data): it takes image of"),
        ("openai:o", LINKED, "takes no document (application/pdf, an address): it takes document"),
        ("bedrock:m", LINKED, "takes no document (application/pdf, an address): it takes document"),
        ("openai:o", {"hologram": {}}, "takes no block of 'hologram'; write"),
        ("anthropic:c", {"type": ["text"]}, "takes no part of type \"['text']\" with"),
        ("anthropic:c", {"image": "x"}, "cannot take it: image needs a source"),
        ("openai:o", {"type": "search_result"}, "takes no part of type 'search_result'"),
        (
            "anthropic:c",
            {"toolResult": {"toolUseId": "c", "content": [AUDIO]}},
            "takes no audio",
        ),
    ],
)
def test_a_block_that_the_provider_lacks_is_refused_with_its_place(
    model: str, block: dict[str, Any], problem: str
) -> None:
    talk = [Message.user("hi"), Message.user([{"text": "see"}, block])]
    with pytest.raises(ConfigurationError) as raised:
        check_messages([model], talk, "input")
    assert str(raised.value).startswith("field 'input.1.content.1")
    assert f"model {model!r} {problem}" in str(raised.value)


@pytest.mark.parametrize("model", ["openai:o", "google:gemini-3-pro", "groq:x", "mine:x"])
def test_a_block_that_the_provider_takes_passes(model: str) -> None:
    """Of two models the second one is refused."""
    talk = [Message.user([{"text": "hear"}, AUDIO])]
    with pytest.raises(ConfigurationError, match="model 'anthropic:c' takes no audio"):
        check_messages([model, "anthropic:c"], talk, "input")


def test_a_line_is_held_to_the_model_of_its_run() -> None:
    agents = {"a": AgentConfig(name="a", model="openai:o")}
    plan = Plan(Submission(agents=agents), lambda _: agents["a"])
    talk = (
        b'[{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "YQ=="}}]}]'
    )
    draft = plan.draft(b'{"input": ' + talk + b"}")
    assert draft.line.messages[0].content == [
        {"audio": {"format": "wav", "source": {"bytes": "YQ=="}}}
    ]
    with pytest.raises(
        ConfigurationError, match=r"field 'input\.0\.content\.0': model 'anthropic:c'"
    ):
        plan.draft(b'{"input": ' + talk + b', "overrides": {"model": "anthropic:c"}}')


def test_the_table_answers_for_a_model() -> None:
    anthropic, old, new = (
        supports(f"{m}") for m in ("anthropic:x", "google:gemini-2.5-pro", "google:gemini-3-pro")
    )
    assert "temperature" not in anthropic.settings
    assert "audio" not in anthropic.blocks
    assert (old.data_beside_tools, new.data_beside_tools) == (False, True)
    assert (dict(old.result_media), "image" in new.result_media) == ({}, True)
    with pytest.raises(ConfigurationError, match="unknown provider"):
        supports("mine:x")


def test_the_page_shows_what_the_table_has() -> None:
    """Every row of the matrix that the table decides."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.splitlines()
        if line.startswith("|")
    ]
    head = next(row for row in rows if row[0] == "")
    models = [supports(COLUMNS[name]) for name in head[1:6]]
    matrix = {row[0]: row[1:] for row in rows if len(row) == len(head)}
    for kind in ("image", "document", "audio"):
        for cell, one in zip(matrix[f"`{kind}`"], models, strict=False):
            formats, _, sources = cell.partition(";")
            assert set(re.findall(r"\w+", formats)) - {"no", "jpg"} == one.blocks.get(
                kind, set()
            ) - {"jpg"}
            assert set(re.findall(r"`(\w+)`", sources)) == one.sources.get(kind, set())
    for setting in ("temperature", "top_p", "seed", "stop", "reasoning_budget", "reasoning_effort"):
        cells = next(cells for name, cells in matrix.items() if f"`{setting}`" in name)
        for cell, one in zip(cells, models, strict=False):
            assert cell.startswith("no") == (setting not in one.settings), (setting, cell)
    for row, holds in (
        (
            "images and documents in a tool's result itself",
            [bool(one.result_media) for one in models],
        ),
        ("parallel calls can be switched off", [one.parallel_switch for one in models]),
        ("strict schemas of tools", [one.strict_tools for one in models]),
    ):
        for cell, held in zip(matrix[row], holds, strict=False):
            assert cell.startswith("yes") == held, row


def test_parallel_calls_are_switched_off_only_where_the_service_can() -> None:
    assert Agent("a", model="anthropic:c", parallel_tool_calls=False).config
    with pytest.raises(ConfigurationError, match="field 'parallel_tool_calls': 'google:g' cannot"):
        Agent("a", model="google:g", parallel_tool_calls=False)
    with pytest.raises(ConfigurationError, match="field 'parallel_tool_calls'"):
        stored_overrides(AgentConfig(name="a", model="google:g"), {"parallel_tool_calls": False})


@pytest.mark.parametrize(
    ("model", "tools", "native"),
    [
        ("google:gemini-2.5-pro", True, False),
        ("google:gemini-2.5-pro", False, True),
        ("google:gemini-3-pro", True, True),
        (["openai:o", "google:gemini-2.0-flash"], True, False),
        ("custom:x", True, True),
    ],
)
async def test_an_answer_is_given_by_a_tool_where_data_beside_tools_are_none(
    model: Any, tools: bool, native: bool
) -> None:
    class Place(BaseModel):
        city: str

    @tool
    def look(at: str) -> str:
        """Look."""
        return at

    given = [look] if tools else []
    agent = Agent("a", model=model, tools=given, output_type=Place, answer_mode="native")
    contract = contract_of(agent.config, ())
    assert contract is not None
    request = await contract.prepare(ModelRequest(model="x", messages=()), a_state())
    assert bool(request.output) == native
    assert [one.name for one in request.tools] == ([] if native else ["structured_response"])
