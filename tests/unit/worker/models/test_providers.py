import asyncio
from pathlib import Path
from typing import Any

import pytest

from stepfleet.orchestrator import (
    LLM,
    ErrorType,
    LLMResponse,
    Message,
    ModelRequest,
    ModelSettings,
    ToolCall,
)
from stepfleet.orchestrator.errors import ModelError, ModelTimeoutError, RateLimitError
from stepfleet.orchestrator.models.endpoint import ModelSetupError
from stepfleet.worker.models import Models
from stepfleet.worker.models.http_model import HttpModel


class Scripted(LLM):
    """Answers with a value, or raises it, or runs it."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.asked: list[ModelRequest] = []
        self.closed = False

    async def generate(self, request: ModelRequest) -> LLMResponse:
        self.asked.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            await asyncio.Event().wait()
        answer: LLMResponse = self.answer
        return answer

    async def aclose(self) -> None:
        self.closed = True


def request(model: str = "mine:fast", timeout: float = 120) -> ModelRequest:
    settings = ModelSettings(timeout=timeout)
    return ModelRequest(model=model, messages=(Message.user("hi"),), settings=settings)


async def generate(llm: LLM, **fields: Any) -> LLMResponse:
    models = Models()
    try:
        return await models.generate(request(**fields), llm=llm)
    finally:
        await models.aclose()


async def test_openai_is_built_in() -> None:
    models = Models()
    llm, name = models.resolve("openai:ft:gpt-4o:org")
    assert isinstance(llm, HttpModel)
    assert name == "ft:gpt-4o:org"
    assert models.resolve("openai:gpt-4o")[0] is llm
    await models.aclose()


@pytest.mark.parametrize("model", ["gpt-4o", "", ":gpt-4o", "openai:"])
async def test_a_model_without_a_provider_says_how_to_write_it(model: str) -> None:
    models = Models()
    with pytest.raises(ModelSetupError, match="write 'openai:") as raised:
        models.resolve(model)
    assert not raised.value.retryable
    await models.aclose()


@pytest.mark.parametrize("model", ["nowhere:m", "custom:Echo"])
async def test_an_unknown_provider_names_the_known_ones(model: str) -> None:
    models = Models(providers={"mine": Scripted})
    with pytest.raises(ModelSetupError, match=r"known: anthropic, .*mine, .*openai"):
        models.resolve(model)
    await models.aclose()


async def test_a_provider_is_made_once_gets_its_own_name_and_is_closed() -> None:
    """LLM-05: another provider under the same call."""
    made: list[Scripted] = []

    def make() -> LLM:
        made.append(Scripted(LLMResponse(content="ok")))
        return made[-1]

    models = Models(providers={"mine": make})
    await models.generate(request("mine:fast"))
    response = await models.generate(request("mine:fast"))
    await models.aclose()
    assert response.model == "fast"
    (llm,) = made
    assert [one.model for one in llm.asked] == ["fast", "fast"]
    assert llm.closed


async def test_a_package_adds_a_provider_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLM-05: a further provider needs no change of agents or of this package."""
    folder = tmp_path / "plugged-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[stepfleet.models]\nplugged = plugged:make\n")
    (tmp_path / "plugged.py").write_text(
        "from stepfleet.orchestrator.models.llm import LLM\n"
        "from stepfleet.orchestrator.records.responses import LLMResponse\n"
        "class Plugged(LLM):\n"
        "    async def generate(self, request):\n"
        "        return LLMResponse(content=request.model)\n"
        "make = Plugged\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    models = Models()
    assert (await models.generate(request("plugged:small"))).content == "small"
    await models.aclose()


async def test_a_provider_that_makes_no_llm_is_named() -> None:
    models = Models(providers={"mine": object})  # type: ignore[dict-item]
    with pytest.raises(ModelSetupError, match="made a object"):
        models.resolve("mine:m")
    await models.aclose()


async def test_the_deadline_holds_for_every_model() -> None:
    """LLM-09: error type timeout; 120 seconds unless the agent says otherwise."""
    assert ModelSettings().timeout == 120
    with pytest.raises(ModelTimeoutError) as raised:
        await generate(Scripted(), timeout=0.01)
    assert raised.value.type is ErrorType.TIMEOUT


async def test_errors_of_the_tree_pass_unchanged() -> None:
    """LLM-06: a custom model may raise them itself."""
    limited = RateLimitError("later", retry_after=2)
    with pytest.raises(RateLimitError) as raised:
        await generate(Scripted(limited))
    assert raised.value is limited


async def test_foreign_errors_become_permanent_model_errors() -> None:
    """LLM-06: uniformly, whoever answers."""
    with pytest.raises(ModelError, match="Scripted failed: KeyError") as raised:
        await generate(Scripted(KeyError("x")))
    assert not raised.value.retryable


@pytest.mark.parametrize("error", [KeyError("x"), ModelError("x")])
async def test_a_failure_of_an_own_model_has_a_code_that_names_no_provider(
    error: Exception,
) -> None:
    with pytest.raises(ModelError) as raised:
        await generate(Scripted(error))
    assert raised.value.code == "MODEL_ERROR"


async def test_no_content_at_all_is_an_empty_text() -> None:
    given = LLMResponse(model="m").model_copy(update={"content": None})
    assert (await generate(Scripted(given))).content == ""


async def test_an_answer_of_the_wrong_type_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="must return LLMResponse"):
        await generate(Scripted("just text"))


async def test_text_is_reported_at_once_by_a_model_that_does_not_stream() -> None:
    told: list[str] = []
    models = Models()
    llm = Scripted(LLMResponse(content="hello"))
    await models.generate(request(), llm=llm, on_text=told.append)
    await models.aclose()
    assert told == ["hello"]


async def test_what_is_no_valid_unicode_in_an_answer_of_others_code_is_replaced_or_refused() -> (
    None
):
    calls = (
        ToolCall(id="a", name="sound", arguments={"city": "Zürich"}),
        ToolCall(id="b", name="broken", arguments={"city": "\ud800"}),
        ToolCall(id="\ud800", name="sound"),
        ToolCall(id="d", name="told", error="why \ud800"),
    )
    given = LLMResponse(content="Zoë \ud800", tool_calls=calls, model="m\udfff")
    told: list[str] = []
    models = Models()
    answer = await models.generate(request(), llm=Scripted(given), on_text=told.append)
    await models.aclose()

    assert (answer.content, answer.model) == (r"Zoë \ud800", r"m\udfff")
    assert told == [answer.content]
    sound, broken, renamed, explained = answer.tool_calls or ()
    assert sound is calls[0]
    assert (broken.id, broken.arguments) == ("b", {})
    assert "lone surrogate" in (broken.error or "")
    assert (renamed.name, renamed.error) == ("sound", None)
    assert explained.error == r"why \ud800"
    answer.to_json()


async def test_a_sound_answer_of_others_code_is_passed_on_as_it_is() -> None:
    given = LLMResponse(content="Zoë", tool_calls=(ToolCall(id="a", name="t"),), model="m")

    assert await generate(Scripted(given)) is given
