"""Vectors of texts from any server that speaks OpenAI's embeddings protocol."""

import os
from collections.abc import Sequence
from typing import Any

import httpx

from stepfleet.orchestrator.agents.recall.notes import OnePerLoop
from stepfleet.orchestrator.errors import AgentMemoryError
from stepfleet.orchestrator.records.text.redaction import name_secret, redact

OPENAI = "https://api.openai.com/v1"


class OpenAIEmbeddings:
    """An embedding function for `VectorMemory`.

    The key is read from the environment variable `api_key_env` at each call; a server without
    keys needs none. `timeout` is in seconds. Raises `AgentMemoryError` when the server fails.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str = OPENAI,
        api_key_env: str = "OPENAI_API_KEY",
        timeout: float = 10.0,
    ) -> None:
        self._model = model
        self._url = f"{base_url.rstrip('/')}/embeddings"
        self._api_key_env = api_key_env
        self._clients = OnePerLoop(lambda: httpx.AsyncClient(timeout=timeout))

    async def __call__(self, texts: Sequence[str]) -> list[list[float]]:
        """Return one vector per text, in their order."""
        name_secret(self._api_key_env)
        key = os.environ.get(self._api_key_env, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = {"model": self._model, "input": list(texts)}
        try:
            reply = await self._clients.get().post(self._url, json=body, headers=headers)
            reply.raise_for_status()
            data: list[dict[str, Any]] = reply.json()["data"]
            ordered = sorted(data, key=lambda one: one["index"])
            return [list(map(float, one["embedding"])) for one in ordered]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            why = redact(f"{type(error).__name__}: {error}"[:500])
            raise AgentMemoryError(f"embeddings of {self._model!r} failed: {why}") from error

    async def aclose(self) -> None:
        """Disconnect in this event loop."""
        await self._clients.close(lambda client: client.aclose())
