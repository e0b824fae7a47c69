"""A model that answers by the number of requests it has had, and a store that weighs claims."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from support.runs.scripted_steps import USAGE

from stepfleet.orchestrator import LLM, LLMResponse, ModelRequest, ToolCall
from stepfleet.orchestrator.memory.conversation import INSTRUCTIONS
from stepfleet.orchestrator.store.lua import RunScripts
from stepfleet.orchestrator.store.runs.steps import StepStore


def look(number: int, text: str = "") -> LLMResponse:
    """Return an answer that calls the tool `look`."""
    call = ToolCall(id=f"c{number}", name="look", arguments={"at": str(number)})
    return LLMResponse(content=text, tool_calls=(call,), usage=USAGE, model="talker")


@dataclass
class Talker(LLM):
    """Answers its n-th request (from 1) with `answer(n, request)`; an exception is raised.

    Requests for summaries are kept apart and answered with "summary N".
    """

    answer: Callable[[int, ModelRequest], Any]
    requests: list[ModelRequest] = field(default_factory=list)
    summaries: list[ModelRequest] = field(default_factory=list)

    async def generate(self, request: ModelRequest) -> LLMResponse:
        if request.messages[0].text == INSTRUCTIONS:
            self.summaries.append(request)
            text = f"summary {len(self.summaries)}"
            return LLMResponse(content=text, usage=USAGE, model="talker")
        self.requests.append(request)
        answer = self.answer(len(self.requests), request)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, LLMResponse)
        return answer


@dataclass(frozen=True, slots=True)
class _WeighingScripts(RunScripts):
    claimed: list[int] = field(default_factory=list)

    async def run(self, name: str, run_id: str, /, *args: Any, **fields: Any) -> Any:
        reply = await RunScripts.run(self, name, run_id, *args, **fields)
        if name == "claim" and reply[0] == "claimed":
            self.claimed.append(len(orjson.dumps(reply[3])))
        return reply


class WeighedStore(StepStore):
    """A store that notes the size of each claim's log, in bytes."""

    claimed: list[int]

    @classmethod
    def over(cls, store: StepStore) -> "WeighedStore":
        """Return a store with the collaborators of `store`."""
        weighed = cls.__new__(cls)
        weighed.__dict__.update(store.__dict__)
        plain = store._pushing
        weighed._pushing = scripts = _WeighingScripts(plain.connection, plain.keys, plain.queue)
        weighed.claimed = scripts.claimed
        return weighed
