"""Answers model calls from the fleet's response cache, and keeps what is worth it.

Decides nothing about requests and answers (`caching` does). If the cache fails, the call is made:
it never fails a step, nor delays one.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

from redis.exceptions import RedisError

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.errors import AgentException, ModelError
from stepfleet.orchestrator.models.caching import (
    CachePolicy,
    answer_of,
    entry_of,
    is_keepable,
    key_of,
    marked,
)
from stepfleet.orchestrator.models.endpoint import endpoint_of
from stepfleet.orchestrator.models.llm import LLM
from stepfleet.orchestrator.models.pricing import Cost, stated_cost
from stepfleet.orchestrator.models.pricing.prices import address_of
from stepfleet.orchestrator.models.services import SERVICES
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.usage import UsageStats, bounded_cost
from stepfleet.orchestrator.store.response_cache import CacheEntries

log = logging.getLogger(__name__)

READ_SECONDS = 0.5
"""The longest wait of a call for the cache."""
KEEP_SECONDS = 5.0
WARN_SECONDS = 60.0
IDENTITY = "cache_identity"
"""Attribute of an agent's own model object: objects of the same identity share answers."""

_ERRORS = (AgentException, RedisError, OSError, TimeoutError)
Call = Callable[[ModelRequest], Awaitable[LLMResponse]]
Work = Callable[[], Awaitable[object]]


class ResponseCache:
    """The cache as the model calls of one event loop use it. `cost` has the worker's prices."""

    def __init__(
        self, entries: CacheEntries, cost: Cost, environment: Mapping[str, str] | None = None
    ) -> None:
        self._entries = entries
        self._cost = cost
        self._environment = os.environ if environment is None else environment
        self._providers: dict[tuple[str | None, ...], str] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self._warned_at = -WARN_SECONDS

    async def answer(
        self,
        request: ModelRequest,
        config: AgentConfig,
        call: Call,
        *,
        llm: LLM | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> LLMResponse:
        """Return the answer that is kept for `request`, else the one of `call`.

        `config` is the run's; `llm` the agent's own model object, if it has one. `on_text` receives
        a kept answer as one piece. Raises what `call` raises.
        """
        policy, key = config.cache, self._key(request, config, llm)
        if policy is None or key is None:
            return await call(request)
        if not policy.refresh and (found := await self._found(key, request.model, config)):
            if on_text is not None and found.content:
                on_text(found.content)
            return found
        response = await call(request)
        if is_keepable(response, request.output):
            self._keep(key, request.model, response, policy)
        return marked(response, key)

    def forget(self, key: str) -> None:
        """Drop an answer that has turned out invalid, after the entries that are being kept.

        Returns at once.
        """
        self._write("cleared", partial(self._entries.drop, key), set(self._under_way))

    async def settle(self, seconds: float) -> None:
        """Return when what is being kept is there, or after `seconds`."""
        if self._under_way:
            await asyncio.wait(list(self._under_way), timeout=seconds)

    # ------------------------------------------------------------------ keys

    def _key(self, request: ModelRequest, config: AgentConfig, llm: LLM | None) -> str | None:
        """Return the request's key; None for one without an identity."""
        try:
            return key_of(request, self._provider(request, config, llm))
        except (ModelError, TypeError, ValueError, RecursionError):
            return None  # the call itself raises the error

    def _provider(self, request: ModelRequest, config: AgentConfig, llm: LLM | None) -> str:
        if llm is not None:
            kind = type(llm)
            known = getattr(llm, IDENTITY, None)
            return str(known or f"{config.name}/{kind.__module__}.{kind.__qualname__}")
        settings, prefix = request.settings, request.model.partition(":")[0]
        service = SERVICES.get(prefix)
        if service is None:
            return f"{prefix} {settings.base_url or ''}"
        where = (prefix, settings.base_url, settings.api_key_env, settings.organization)
        if where not in self._providers:
            self._providers[where] = endpoint_of(settings, self._environment, service).url
        return self._providers[where]

    # ------------------------------------------------------------------ entries

    async def _found(self, key: str, model: str, config: AgentConfig) -> LLMResponse | None:
        address = address_of(model, config.settings.base_url)

        def cost(named: str, usage: UsageStats, tier: str) -> float:
            names = (named, model)
            stated = stated_cost(config.pricing, names, usage, tier) if config.pricing else None
            if stated is None:
                stated = self._cost(named, usage, tier, address)
            return bounded_cost(stated)

        try:
            async with asyncio.timeout(READ_SECONDS):
                entry = await self._entries.read(key, model)
        except _ERRORS as error:
            self._warn("read", error)
            return None
        return answer_of(entry, key, model, cost) if entry else None

    def _keep(self, key: str, model: str, response: LLMResponse, policy: CachePolicy) -> None:
        entry = entry_of(response)
        if len(entry) > policy.max_entry_bytes or len(entry.encode()) > policy.max_entry_bytes:
            return
        self._write("filled", partial(self._entries.keep, key, model, entry, policy.ttl))

    def _write(self, what: str, work: Work, before: Collection[asyncio.Task[None]] = ()) -> None:
        """Have `work` done after `before`, and log its error."""

        async def write() -> None:
            if before:
                await asyncio.wait(before)
            try:
                async with asyncio.timeout(KEEP_SECONDS):
                    await work()
            except _ERRORS as error:
                self._warn(what, error)

        # Not in the step: an answer that was paid for must not be lost while this is in progress.
        task = asyncio.get_running_loop().create_task(write())
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def _warn(self, what: str, error: BaseException) -> None:
        now = time.monotonic()
        if now - self._warned_at >= WARN_SECONDS:
            self._warned_at = now
            reason = f"{type(error).__name__}: {error}"
            log.warning("the response cache cannot be %s (calls are made): %s", what, reason)
