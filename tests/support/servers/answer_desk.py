"""Asks a model whose server answers with raw bytes, and returns what the client makes of them."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from support.servers.raw_model_server import RawModelServer, Script

from stepfleet.orchestrator import LLMResponse, Message, ModelRequest, ModelSettings
from stepfleet.orchestrator.errors import ModelError
from stepfleet.worker.models import Models

_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "AWS_BEARER_TOKEN_BEDROCK")


@dataclass(frozen=True)
class AnswerDesk:
    """A server and the client that calls it, in a loop of their own."""

    loop: asyncio.AbstractEventLoop
    server: RawModelServer
    models: Models

    def ask(self, model: str, script: Script, *, stream: bool) -> LLMResponse | ModelError:
        """Return the answer that the model gives, or the failure of the call."""
        self.server.answers(script)
        asked = ModelRequest(
            model=model,
            messages=(Message.user("hi"),),
            settings=ModelSettings(base_url=self.server.base_url, stream=stream, timeout=30),
        )
        try:
            return self.loop.run_until_complete(self.models.generate(asked))
        except ModelError as error:
            return error


@contextlib.contextmanager
def answer_desk() -> Iterator[AnswerDesk]:
    """Open a desk until the block ends."""
    loop = asyncio.new_event_loop()
    desk = AnswerDesk(loop, RawModelServer(), Models(environment=dict.fromkeys(_KEYS, "k")))
    with contextlib.closing(loop):
        running = desk.server.running()
        loop.run_until_complete(running.__aenter__())
        yield desk
        loop.run_until_complete(desk.models.aclose())
        loop.run_until_complete(running.__aexit__(None, None, None))
