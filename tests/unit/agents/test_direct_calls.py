"""A model asked directly: for its answer, or for JSON of a schema."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel
from support.runs.scripted_steps import Script, call, say

from stepfleet.orchestrator import ConfigurationError, Message, ModelSettings, ToolSpec
from stepfleet.orchestrator.agents.direct import LLMModel, Model
from stepfleet.orchestrator.errors import ModelError, ModelTimeoutError

ASKED = [Message.user("How much?")]


class Price(BaseModel):
    """What is asked for."""

    usd: float


def test_the_interface_has_three_methods_that_every_model_writes() -> None:
    """LLM-03"""
    assert Model.__abstractmethods__ == {"get_text", "get_json", "update_config"}
    with pytest.raises(TypeError, match="abstract"):
        Model()  # type: ignore[abstract]


async def test_a_text_is_asked_for_with_prompt_and_tools() -> None:
    """LLM-03"""
    llm = Script([call(("look", {"what": "a"}), text="Looking.")])
    spec = ToolSpec(name="look")
    model = LLMModel(llm, "m")
    answer = await model.get_text(ASKED, "Be brief.", [spec], tool_choice="look")
    assert (answer.content, answer.tool_calls and answer.tool_calls[0].name) == ("Looking.", "look")
    (request,) = llm.requests
    assert [one.text for one in request.messages] == ["Be brief.", "How much?"]
    assert (request.model, request.tools, request.tool_choice) == ("m", (spec,), "look")
    assert request.output is None


@pytest.mark.parametrize("schema", [Price, Price.model_json_schema()])
async def test_json_is_a_dict_that_is_valid_for_the_schema(schema: Any) -> None:
    """LLM-03"""
    llm = Script([say('```json\n{"usd": 3.5}\n```')])
    assert await LLMModel(llm).get_json(ASKED, schema) == {"usd": 3.5}
    output = llm.requests[0].output
    assert output is not None
    assert output.name == "Price"
    assert output.json_schema is not None
    assert output.json_schema["required"] == ["usd"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("three", "not valid JSON"),
        ('{"usd": "x"}', "does not fit the schema"),
        ("[1]", "does not fit"),
    ],
)
async def test_an_answer_that_is_not_valid_is_a_model_error(text: str, said: str) -> None:
    """LLM-03"""
    with pytest.raises(ModelError, match=said):
        await LLMModel(Script([say(text)])).get_json(ASKED, Price)


async def test_a_changed_configuration_is_that_of_one_object_alone() -> None:
    """LLM-03, LLM-18"""
    llm, shared = Script([say("hi")]), ModelSettings(temperature=0.5, max_tokens=9)
    changed, other = LLMModel(llm, "m", shared), LLMModel(llm, "m", shared)
    await changed.update_config(temperature=1, model="m2")
    for model in (changed, other):
        await model.get_text(ASKED)
    sent = [(one.model, one.settings.temperature, one.settings.max_tokens) for one in llm.requests]
    assert sent == [("m2", 1, 9), ("m", 0.5, 9)]
    assert (shared.temperature, other.settings) == (0.5, shared)


async def test_a_configuration_that_cannot_be_is_reported_and_changes_nothing() -> None:
    """LLM-03, CONF-04"""
    model = LLMModel(Script([say("hi")]))
    with pytest.raises(ConfigurationError, match="'temperature'"):
        await model.update_config(temperature=9)
    with pytest.raises(ConfigurationError, match="'heat' is not known"):
        await model.update_config(heat=1)
    assert model.settings == ModelSettings()


async def test_an_answer_that_does_not_come_is_a_timeout() -> None:
    """LLM-03"""

    async def never(_: object) -> None:
        await asyncio.Event().wait()

    model = LLMModel(Script([never]), settings=ModelSettings(timeout=0.01))
    with pytest.raises(ModelTimeoutError, match=r"within 0\.01 s"):
        await model.get_text(ASKED)
