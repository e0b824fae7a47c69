"""An agent against a script: real steps and real tools, a model that answers from a list.

A script that does not fit fails the test at once, with the conversation: nothing is tried again.
"""

import asyncio
import copy
from collections.abc import Mapping, Sequence
from itertools import count
from types import TracebackType
from typing import Any, Self, Unpack

from pydantic import BaseModel

from stepfleet.orchestrator.agents.agent import Agent, with_sub_agents
from stepfleet.orchestrator.agents.answers.definitions import STRUCTURED_RESPONSE
from stepfleet.orchestrator.agents.config import RunOverrides
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.client.inputs import Input
from stepfleet.orchestrator.client.local import DebugStep, LocalFleet, stepped
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.memory.pruning import estimate_tokens
from stepfleet.orchestrator.models.llm import LLM
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.run.results import AgentRunResult
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import UsageStats
from stepfleet.orchestrator.settings.settings import Settings, load_settings
from stepfleet.orchestrator.tools.calls import parse_tool_calls
from stepfleet.worker.testing.scenario import Reply, ToolCallReply

_Data = BaseModel | Mapping[str, Any]
ScriptedReply = str | Reply | ToolCallReply | Sequence[ToolCallReply] | _Data
ScriptEntry = ScriptedReply | Exception
"""A text, tool calls of one turn, data (as the agent's answer takes it), or a provider's error."""
SHOWN = 500


class ScriptError(AssertionError):
    """The script and the run do not fit; the message shows the conversation."""


def call(tool: str, /, **arguments: Any) -> ToolCallReply:
    """Return a scripted call of a tool; a list of them is one turn with several calls."""
    return ToolCallReply(tool, arguments)


class ScriptedModel(LLM):
    """Answers each request with the next entry of a script; `problem` is the first misfit."""

    def __init__(self, script: Sequence[ScriptEntry]) -> None:
        self.script = tuple(script)
        self.requests = 0
        self.conversation: tuple[Message, ...] = ()
        self.problem = ""

    async def generate(self, request: ModelRequest) -> LLMResponse:
        """Return the next reply. Raises `ModelError` where there is none that fits."""
        self.requests += 1
        self.conversation = request.messages
        if self.requests > len(self.script):
            raise self._misfit(
                f"the agent called the model {self.requests} times, and the script has "
                f"{len(self.script)} replies: add what the model answers now"
            )
        entry = self.script[self.requests - 1]
        if isinstance(entry, Exception):
            raise entry
        offered = sorted(tool.name for tool in request.tools or ())
        reply = self._reply(entry, offered)
        for one in reply.tool_calls:
            if one.name not in offered:
                raise self._misfit(
                    f"reply {self.requests} of the script calls the tool {one.name!r}; the agent "
                    f"offers: {', '.join(offered) or 'none'}"
                )
        return self._response(reply, request)

    def _reply(self, entry: ScriptedReply, offered: Sequence[str]) -> Reply:
        if isinstance(entry, BaseModel | Mapping):
            data = entry.model_dump(mode="json") if isinstance(entry, BaseModel) else entry
            if STRUCTURED_RESPONSE in offered:
                return Reply(tool_calls=(call(STRUCTURED_RESPONSE, structured=data),))
            return Reply(exact_json.text(data))
        if isinstance(entry, str):
            return Reply(entry)
        calls = _calls(entry)
        if not isinstance(entry, Reply) and not calls:
            raise self._misfit(
                f"reply {self.requests} of the script is {entry!r}; write text, call(...), a "
                "list of calls, data or an exception"
            )
        return entry if isinstance(entry, Reply) else Reply(tool_calls=calls)

    def _response(self, reply: Reply, request: ModelRequest) -> LLMResponse:
        numbers = count()
        calls = parse_tool_calls(
            reply.tool_calls, new_id=lambda: f"call_{self.requests}_{next(numbers)}"
        )
        answer = Message.assistant(reply.content or "", tool_calls=calls)
        spent, made = sum(map(estimate_tokens, request.messages)), estimate_tokens(answer)
        return LLMResponse(
            content=reply.content or "",
            tool_calls=calls,
            finish_reason=FinishReason.TOOL_CALLS if calls else FinishReason.STOP,
            usage=UsageStats(
                prompt_tokens=spent, completion_tokens=made, total_tokens=spent + made
            ),
        )

    def _misfit(self, problem: str) -> ModelError:
        self.problem = self.problem or problem
        return ModelError(problem)


class Scripted:
    """Runs agents against scripts on a private server: the fixture `scripted`.

    `steps` are those of the newest run, and `calls` its tool calls: name, arguments, and result or
    error. Each worker process of pytest-xdist has a server of its own.
    """

    def __init__(self) -> None:
        self._local = LocalFleet()
        self._settings: Settings | None = None
        self.steps: list[DebugStep] = []

    def __enter__(self) -> Self:
        settings = self._local.settings(load_settings())
        self._settings = settings.model_copy(update={"webhooks": (), "events_url": None})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._local.stop()

    def anew(self) -> "Scripted":
        """Return one without runs, on the same server."""
        made = copy.copy(self)
        made.steps = []
        return made

    @property
    def calls(self) -> list[tuple[str, dict[str, Any], Any]]:
        """The newest run's tool calls: name, arguments, and result or the error's message."""
        return [
            (one.tool_name, one.arguments, one.error.message if one.error else one.result)
            for step in self.steps
            for one in step.calls
        ]

    def run(
        self,
        agent: Agent,
        given: Input,
        script: Sequence[ScriptEntry],
        **overrides: Unpack[RunOverrides],
    ) -> AgentRunResult:
        """Run `agent` with that input to its end; the model answers from `script`, in order.

        Agents that go on with the run, or are tools of it, answer from it, too.
        Tools run in the calling thread: patches and `breakpoint()` work. A provider's error that
        may be tried again is, after its delay. Raises `ScriptError` at once where a reply calls a
        tool that is not on offer, the agent asks for more replies than there are, or replies are
        left at the end; the message shows the conversation.
        """
        __tracebackhide__ = True
        _refuse_event_loop()
        model = ScriptedModel([script] if isinstance(script, str) else script)
        self.steps = []
        asyncio.run(self._play(agent, given, model, overrides))
        result = self.steps[-1].result if self.steps else None
        left = len(model.script) - model.requests
        if not model.problem and left > 0:
            why = f"{result.stop_reason}" if result else "before its first step"
            model.problem = (
                f"{left} of {len(model.script)} replies of the script were not used: the run ended "
                f"after {model.requests} ({why})"
            )
        if model.problem or result is None:
            raise ScriptError(f"{model.problem or 'the run did not begin'}\n\n{self._shown(model)}")
        return result

    async def _play(
        self, agent: Agent, given: Input, model: ScriptedModel, overrides: RunOverrides
    ) -> None:
        if self._settings is None:
            raise RuntimeError("use Scripted in a `with` block, or the fixture `scripted`")
        settings = self._settings
        played = [copy.copy(one) for one in with_sub_agents([agent]).values()]
        for one in played:
            vars(one)["llm"] = model

        async def submit() -> str:
            async with AsyncFleet(settings=settings, brings=[one.name for one in played]) as fleet:
                return await fleet.submit(agent, given, **overrides)

        steps = stepped(settings, played, submit)
        try:
            async for step in steps:
                self.steps.append(step)
                if model.problem:
                    return
        finally:
            await steps.aclose()

    def _shown(self, model: ScriptedModel) -> str:
        lines_of = [f"  {one.role}: {_cut(one.text)}" for one in model.conversation if one.text]
        lines = ["The conversation of the last request:", *lines_of]
        done = [one for one in self.steps if not one.error or one.error.message != model.problem]
        if done:
            lines += ["What the run did:", *(f"  {line}" for line in _lines(done))]
        return "\n".join(lines)


def _lines(steps: Sequence[DebugStep]) -> list[str]:
    return [line for step in steps for line in str(step).splitlines()]


def _calls(entry: object) -> tuple[ToolCallReply, ...]:
    """Return the tool calls of an entry; none where it is something else."""
    given = (entry,) if isinstance(entry, ToolCallReply) else entry
    if not isinstance(given, Sequence) or not all(isinstance(one, ToolCallReply) for one in given):
        return ()
    return tuple(given)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _refuse_event_loop() -> None:
    __tracebackhide__ = True
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    msg = "an event loop runs here: write `await asyncio.to_thread(scripted.run, agent, ...)`"
    raise RuntimeError(msg)
