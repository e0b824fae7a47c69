"""Which model of an agent's list answers: the first one that is not out and not too small.

A model is out after a connection failure, a server error or a timeout. Refusals of the request
itself (a key, a model's name, an argument, content) pass to no other model: they are mistakes of
the configuration, and the next model's answer would hide them. Nor does a rate limit. A further
model whose own budget is spent is passed over.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from stepfleet.orchestrator.errors import ContextWindowError, ModelError
from stepfleet.orchestrator.memory.pruning import prune_to_token_limit
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.usage import Fallback
from stepfleet.worker.attempt.usage import failed_call
from stepfleet.worker.ports import Call

Shorten = Callable[[ModelRequest, ContextWindowError], ModelRequest | None]

_OUTAGES = {
    ModelErrorCode.CONNECTION_ERROR,
    ModelErrorCode.SERVER_ERROR,
    ModelErrorCode.TIMEOUT,
    ModelErrorCode.CIRCUIT_OPEN,
    ModelErrorCode.OTHER,
}


def is_outage(error: ModelError) -> bool:
    """Return whether the service, and not the request, is at fault."""
    return error.retryable and error.code in _OUTAGES


def _has_no_budget(error: ModelError) -> bool:
    return error.unsent and not error.retryable


@dataclass
class _Tries:
    """What became of the models that did not answer."""

    failed: list[tuple[ModelRequest, ModelError]] = field(default_factory=list)

    def pass_over(self, request: ModelRequest, error: ModelError) -> None:
        """Note a failed call, after which the next model is called. Raises `ModelError`."""
        self.failed.append((request, error))
        if isinstance(error, ContextWindowError) or is_outage(error) or _has_no_budget(error):
            return
        if len(self.failed) == 1:
            raise error
        raise self.error() from None

    def answered(self, response: LLMResponse, model: str) -> LLMResponse:
        """Return the response with the calls that had failed before."""
        if not self.failed:
            return response
        failed = tuple(failed_call(request, error) for request, error in self.failed)
        return response.model_copy(update={"fallback": Fallback(model=model, failed=failed)})

    def error(self) -> ModelError:
        """Return the failure of all: one that may pass where one of them may.

        Its message names each model.
        """
        errors = [error for _, error in self.failed]
        raised = next((one for one in reversed(errors) if one.retryable), errors[-1])
        if len(errors) > 1:
            tried = reversed(self.failed)  # the last is why no one answered
            texts = (f"{request.model}: {error.message}" for request, error in tried)
            # The step waits for all that are out, unless one may answer the next attempt.
            out = {of: None for one in errors for of in one.outage}
            may_answer = any(one.retryable and not one.outage for one in errors)
            raised.outage = () if may_answer else tuple(out)
            raised.message = "; after ".join(texts)
        return raised


async def first_answer(
    request: ModelRequest, models: tuple[str, ...], ask: Call, shorten: Shorten
) -> tuple[LLMResponse, ModelRequest]:
    """Return the answer of the first of `models` that gives one, and the request of that call.

    Where all that are there are too small for the conversation, it is shortened once for the first
    of these. Raises `ModelError`.
    """
    tries = _Tries()
    for model in models:
        sent = request
        if model != request.model and len(models) > 1:
            sent = request.model_copy(update={"model": model})
        try:
            return tries.answered(await ask(sent), model), sent
        except ModelError as failed:
            tries.pass_over(sent, failed)
    for sent, error in tries.failed:
        if isinstance(error, ContextWindowError) and (shorter := shorten(sent, error)):
            if len(models) == 1:
                return await ask(shorter), shorter
            try:
                return tries.answered(await ask(shorter), sent.model), shorter
            except ModelError as failed:
                tries.pass_over(shorter, failed)
            break
    raise tries.error()


def pruned(request: ModelRequest, error: ContextWindowError) -> ModelRequest | None:
    """Return the request with fewer messages; None where none can go."""
    for limit in (error.limit, None):
        messages = prune_to_token_limit(request.messages, limit)
        if len(messages) < len(request.messages):
            return request.model_copy(update={"messages": messages})
    return None
