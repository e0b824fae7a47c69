"""Agents whose own code says a secret when it fails: in each place where errors come from."""

import os
from typing import Any

from stepfleet.orchestrator import (
    LLM,
    Agent,
    ErrorPolicy,
    LLMResponse,
    ModelRequest,
    SpecialTool,
    Strategy,
    ToolCall,
    WithMedia,
    tool,
    when,
)


def secret() -> str:
    """Return the worker's secret; clients have another one, or none."""
    return os.environ.get("VAULT_PASS", "no secret")


class Caller(LLM):
    """Calls a tool, if there is one, and then answers."""

    async def generate(self, request: ModelRequest) -> LLMResponse:
        if request.messages[-1].role.value != "user" or not request.tools:
            return LLMResponse(content="done", model="caller")
        name = next((t.name for t in request.tools if t.name != "answer"), "answer")
        calls = (ToolCall(id="c1", name=name, arguments={}),)
        return LLMResponse(content="", model="caller", tool_calls=calls)


class Failing(LLM):
    """Fails with the secret."""

    async def generate(self, request: ModelRequest) -> LLMResponse:
        raise ValueError(f"login with {secret()} failed")


class Leaving(Strategy):
    """Fails with the secret when it reads a turn."""

    async def process_step(self, *_: Any) -> None:
        raise ValueError(f"strategy has {secret()}")

    def should_continue(self, parsed_output: Any) -> bool:
        return False

    def get_history(self, state: Any) -> list[Any]:
        return []


class Forgetting:
    """A memory that fails with the secret."""

    async def add(self, text: str) -> None:
        """Remember nothing."""

    async def get_context(self, query: str, max_tokens: int) -> str:
        raise ValueError(f"memory has {secret()}")

    async def clear(self) -> None:
        """Forget nothing."""


def judge(_: Any) -> Any:
    """Fail with the secret."""
    raise ValueError(f"criterion has {secret()}")


@tool(read_only=True)
def chained() -> str:
    """Fail for a reason that has the secret."""
    nothing: dict[str, str] = {}
    try:
        return nothing[secret()]
    except KeyError as error:
        raise RuntimeError(f"because of {error}") from error


@tool(read_only=True)
def grouped() -> str:
    """Fail in two ways at once."""
    raise ExceptionGroup(f"with {secret()}", [ValueError(secret()), KeyError(secret())])


@tool(read_only=True)
def shown() -> WithMedia:
    """Show the secret."""
    return WithMedia("shown", [{"text": f"the secret is {secret()}"}])


def handle(call: Any, state: Any, sink: Any) -> Any:
    """Fail with the secret."""
    raise ValueError(f"handler has {secret()}")


POLICY = ErrorPolicy.ignore_tool_errors()
NO_TRIES = ErrorPolicy.stop_on_any_error()


def agent(name: str, model: LLM | None = None, **fields: Any) -> Agent:
    """Return an agent by that name."""
    given: dict[str, Any] = {"error_policy": POLICY, **fields}
    return Agent(name, model=model or Caller(), **given)


leaks = [
    agent("of_the_model", Failing(), error_policy=NO_TRIES),
    agent("of_the_strategy", strategy=Leaving(), error_policy=NO_TRIES),
    agent("of_the_memory", context=Forgetting(), error_policy=NO_TRIES),
    agent("of_the_criterion", criteria=[when(judge)]),
    agent("of_a_chain", tools=[chained]),
    agent("of_a_group", tools=[grouped]),
    agent("of_media", tools=[shown]),
    agent(
        "of_a_handler",
        special_tools=[SpecialTool(name="leave", description="Leave.", handler=handle)],
    ),
]
