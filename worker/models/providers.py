"""Finds the model of a name and calls it, under one deadline and one error tree.

Built once per event loop by the worker's composition root. Knows no agent: custom models come
in as objects.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from typing import Any, Protocol, runtime_checkable

from stepfleet.orchestrator.errors import (
    AgentException,
    ModelError,
    ModelTimeoutError,
    RateLimitError,
)
from stepfleet.orchestrator.models.endpoint import ModelSetupError
from stepfleet.orchestrator.models.llm import LLM
from stepfleet.orchestrator.models.services import ENTRY_POINTS, SERVICES, Api, limit_name
from stepfleet.orchestrator.records.base import well_formed
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.worker.attempt.sanitize import storable
from stepfleet.worker.models.anthropic import MESSAGES
from stepfleet.worker.models.bedrock.converse import CONVERSE
from stepfleet.worker.models.connections import Connections
from stepfleet.worker.models.google import GENERATE_CONTENT
from stepfleet.worker.models.http_model import RESPONSE_LIMIT, Format, HttpModel
from stepfleet.worker.models.openai.chat import (
    AZURE_CHAT_COMPLETIONS,
    CHAT_COMPLETIONS,
    chat_of,
)
from stepfleet.worker.models.responses import RESPONSES

ProviderFactory = Callable[[], LLM]
FORMATS: Mapping[Api, Format] = {
    Api.CHAT: CHAT_COMPLETIONS,
    Api.AZURE: AZURE_CHAT_COMPLETIONS,
    Api.RESPONSES: RESPONSES,
    Api.MESSAGES: MESSAGES,
    Api.GENERATE_CONTENT: GENERATE_CONTENT,
    Api.CONVERSE: CONVERSE,
}


@runtime_checkable
class StreamsText(Protocol):
    """A model that reports its text while it answers."""

    async def generate_streaming(
        self, request: ModelRequest, on_text: Callable[[str], None]
    ) -> LLMResponse:
        """Answer the request and pass each piece of text to `on_text` as it arrives."""
        ...


class Watch(Protocol):
    """Learns of the limits of models, by their names."""

    def note_headers(self, limit: str, headers: Mapping[str, str], seconds: float) -> None:
        """Note the headers of an answer over HTTP, which took `seconds`."""

    def note_refusal(
        self,
        limit: str,
        retry_after: float | None,
        seconds: float,
        stated: Mapping[str, float] | None = None,
    ) -> None:
        """Note a 429, how many seconds ago the call was sent, and the limits that it states."""


class Models:
    """Every model that this worker can call; the services of `orchestrator.models` are built in.

    `providers` maps further prefixes to functions that make an `LLM` (once, at first use);
    they win over entry points and over the built-in ones. `connections` limits the open HTTP
    connections (0: no limit), `response_limit` an answer's bytes. `environment` replaces the
    process's own; `watch` learns of limits. Belongs to the event loop that first calls it.
    """

    def __init__(
        self,
        *,
        providers: Mapping[str, ProviderFactory] | None = None,
        connections: int = 0,
        response_limit: int = RESPONSE_LIMIT,
        environment: Mapping[str, str] | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._connections = Connections(connections)
        options = {"environment": environment, "response_limit": response_limit}
        self._factories: dict[str, ProviderFactory] = {
            **{
                name: partial(
                    service_model,
                    name,
                    self._connections,
                    on_headers=partial(self._note, name),
                    **options,
                )
                for name in SERVICES
            },
            **(providers or {}),
        }
        self._made: dict[str, LLM] = {}
        self._watch = watch

    def resolve(self, model: str) -> tuple[LLM, str]:
        """Return the model behind `provider:name`, and the name as its provider knows it.

        Raises `ModelSetupError` when there is no provider or no such one.
        """
        provider, colon, name = model.partition(":")
        if not colon or not provider or not name:
            msg = f"model {model!r} must name its provider: write 'openai:{model.strip(':')}'"
            raise ModelSetupError(msg)
        if provider not in self._made:
            self._made[provider] = self._make(provider, model)
        return self._made[provider], name

    def service(self, request: ModelRequest) -> str:
        """Return the address and the model that answer a request, else the model's name.

        Raises `ModelSetupError` as a call does.
        """
        llm, name = self.resolve(request.model)
        if isinstance(llm, HttpModel):
            return f"{llm.address(request.settings)} {name}"
        return request.model

    async def generate(
        self,
        request: ModelRequest,
        *,
        llm: LLM | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> LLMResponse:
        """Make one model call: of `llm` if given, else of the model that the request names.

        `on_text` gets the text piece by piece where model and settings stream, else at once.
        Raises nothing but `AgentException`s, for a model's failures `ModelError` and its
        subclasses; `ModelTimeoutError` after `settings.timeout` seconds.
        """
        model, settings = request.model, request.settings
        if llm is None:
            llm, name = self.resolve(model)
            request = request.model_copy(update={"model": name})
        watch = self._watch
        sent = asyncio.get_running_loop().time()
        try:
            return await _guarded(llm, request, on_text)
        except ModelError as error:
            error.model = model
            if isinstance(error, RateLimitError) and watch is not None and not error.sheds:
                error.limit = limit_name(model, settings)
                seconds = asyncio.get_running_loop().time() - sent
                watch.note_refusal(error.limit, error.retry_after, seconds, error.stated)
            raise

    async def aclose(self) -> None:
        """Close all connections and every provider that has an `aclose`."""
        for llm in self._made.values():
            close = getattr(llm, "aclose", None)
            if inspect.iscoroutinefunction(close):
                await close()
        self._made.clear()
        await self._connections.aclose()

    def _note(
        self, provider: str, request: ModelRequest, headers: Mapping[str, str], seconds: float
    ) -> None:
        if self._watch is not None:
            limit = limit_name(f"{provider}:{request.model}", request.settings)
            self._watch.note_headers(limit, headers, seconds)

    def _make(self, provider: str, model: str) -> LLM:
        factory = self._factories.get(provider) or _entry_point(provider)
        if factory is None:
            known = ", ".join(sorted(self._factories))
            msg = (
                f"model {model!r}: no provider {provider!r} on this worker (known: {known}); add a "
                f"package with an entry point in {ENTRY_POINTS!r}. A custom model object is found "
                "only where its agent's code is loaded (--agents)"
            )
            raise ModelSetupError(msg)
        made: Any = factory()
        if not isinstance(made, LLM):
            msg = (
                f"provider {provider!r} made a {type(made).__name__}, which has no generate/stream"
            )
            raise ModelSetupError(msg)
        llm: LLM = made
        return llm


def service_model(name: str, connections: Connections, **options: Any) -> HttpModel:
    """Return the models of the service `name`; `options` are those of `HttpModel`."""
    service = SERVICES[name]
    form = FORMATS[service.api]
    if service.api in (Api.CHAT, Api.AZURE):
        form = chat_of(form, name, service.reasoning)
    return HttpModel(service, form, connections, **options)


def generate_sync(request: ModelRequest, *, llm: LLM | None = None) -> LLMResponse:
    """Make one model call from code without an event loop; same results and exceptions.

    Opens its own connection: for scripts and shells, not for workers.
    """

    async def call() -> LLMResponse:
        models = Models()
        try:
            return await models.generate(request, llm=llm)
        finally:
            await models.aclose()

    return asyncio.run(call())


def _entry_point(provider: str) -> ProviderFactory | None:
    for found in metadata.entry_points(group=ENTRY_POINTS, name=provider):
        factory: ProviderFactory = found.load()
        return factory
    return None


async def _guarded(
    llm: LLM, request: ModelRequest, on_text: Callable[[str], None] | None
) -> LLMResponse:
    """Hold any model to the deadline, to the exception tree and to the type of its answer."""
    kind = type(llm).__name__
    seconds = request.settings.timeout
    text = on_text and _well_formed_to(on_text)
    try:
        if type(llm) is HttpModel:  # keeps the deadline itself, and two cost twice
            response: Any = await _call(llm, request, text)
        else:
            async with asyncio.timeout(seconds):
                response = await _call(llm, request, text)
    except AgentException:
        raise
    except TimeoutError:
        msg = f"no answer from {kind} within {seconds:g} s (settings.timeout)"
        raise ModelTimeoutError(msg) from None
    except Exception as error:
        raise ModelError(f"model {kind} failed: {type(error).__name__}: {error}") from error
    if not isinstance(response, LLMResponse):
        msg = f"model {kind} returned a {type(response).__name__}: generate must return LLMResponse"
        raise ModelError(msg)
    answer = storable(response, parsed=type(llm) is HttpModel)
    if answer.model:
        return answer
    return answer.model_copy(update={"model": request.model})


def _well_formed_to(on_text: Callable[[str], None]) -> Callable[[str], None]:
    return lambda piece: on_text(well_formed(piece))


async def _call(
    llm: LLM, request: ModelRequest, on_text: Callable[[str], None] | None
) -> LLMResponse:
    if on_text is None:
        return await llm.generate(request)
    if request.settings.stream and isinstance(llm, StreamsText):
        return await llm.generate_streaming(request, on_text)
    response = await llm.generate(request)
    if response.content:
        on_text(response.content)
    return response
