"""Direct calls of a model, outside of runs: for its answer, or for JSON of a schema.

A thin layer over `LLM`; agents need none of it. Knows no provider and no worker.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from stepfleet.orchestrator.errors import ConfigurationError, ModelError, ModelTimeoutError
from stepfleet.orchestrator.models.llm import LLM
from stepfleet.orchestrator.records.calls.tools import ToolSpec
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.responses import (
    LLMResponse,
    ModelRequest,
    ModelSettings,
    OutputFormat,
)
from stepfleet.orchestrator.records.text.validation import explain_invalid
from stepfleet.orchestrator.tools.schemas.bounded_json import BoundsError, read_data
from stepfleet.orchestrator.tools.schemas.handles import schema_of


class Model(ABC):
    """The calls of a model."""

    @abstractmethod
    async def get_text(
        self,
        messages: Sequence[Message],
        system_prompt: str = "",
        tool_specs: Sequence[ToolSpec] = (),
        *,
        tool_choice: str = "auto",
    ) -> LLMResponse:
        """Return the answer: its text and its tool calls.

        Raises `ModelError` or one of its subclasses.
        """

    @abstractmethod
    async def get_json(
        self, messages: Sequence[Message], schema: Any, system_prompt: str = ""
    ) -> dict[str, Any]:
        """Return an answer that is valid for `schema`: a JSON Schema, or a type pydantic knows.

        Raises `ModelError` for an answer that is not, `ConfigurationError` for a bad schema.
        """

    @abstractmethod
    async def update_config(self, **changes: Any) -> None:
        """Change the settings of this object: fields of `ModelSettings`, or its `model`.

        No other object and no run is touched. Raises `ConfigurationError` that names the field.
        """


class LLMModel(Model):
    """Calls an `LLM`. `model` is the name that is sent; `settings` begin as given."""

    def __init__(self, llm: LLM, model: str = "", settings: ModelSettings | None = None) -> None:
        self._llm = llm
        self._model = model
        self._settings = settings or ModelSettings()

    @property
    def settings(self) -> ModelSettings:
        """The current settings."""
        return self._settings

    async def get_text(
        self,
        messages: Sequence[Message],
        system_prompt: str = "",
        tool_specs: Sequence[ToolSpec] = (),
        *,
        tool_choice: str = "auto",
    ) -> LLMResponse:
        """Return the answer: its text and its tool calls."""
        tools = tuple(tool_specs)
        return await self._answer(messages, system_prompt, tools=tools, tool_choice=tool_choice)

    async def get_json(
        self, messages: Sequence[Message], schema: Any, system_prompt: str = ""
    ) -> dict[str, Any]:
        """Return an answer that is valid for `schema`."""
        handle = schema_of(schema)
        wanted = OutputFormat(name=handle.name or "response", json_schema=handle.schema)
        response = await self._answer(messages, system_prompt, output=wanted)
        try:
            data = read_data(response.content, limit=256 * 1024)
        except BoundsError as error:
            raise ModelError(f"the model's answer is not valid JSON: {error}") from None
        if problems := handle.problems(data):
            raise ModelError(f"the model's answer does not fit the schema: {problems}")
        return dict(data)

    async def update_config(self, **changes: Any) -> None:
        """Change the settings of this object."""
        model = changes.pop("model", self._model)
        fields: Mapping[str, Any] = {**self._settings.model_dump(), **changes}
        try:
            self._settings = ModelSettings.model_validate(fields)
        except ValidationError as error:
            raise ConfigurationError(f"update_config: {explain_invalid(error)}") from None
        self._model = model

    async def _answer(
        self, messages: Sequence[Message], system_prompt: str, **fields: Any
    ) -> LLMResponse:
        given = (*([Message.system(system_prompt)] if system_prompt else ()), *messages)
        seconds = self._settings.timeout
        request = ModelRequest(model=self._model, messages=given, settings=self._settings, **fields)
        try:
            async with asyncio.timeout(seconds):
                return await self._llm.generate(request)
        except TimeoutError:
            raise ModelTimeoutError(f"no answer within {seconds:g} s (settings.timeout)") from None
