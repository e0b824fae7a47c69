"""The agent of the arithmetic example on a model of each protocol, with a price."""

from stepfleet.orchestrator import Agent, ErrorPolicy, calculator


def solver(provider: str) -> Agent:
    """Return the agent of the provider's name."""
    return Agent(
        provider,
        model=f"{provider}:tiny",
        instructions="Do every calculation with the calculator.",
        tools=[calculator],
        max_steps=12,
        pricing={"input": 1.0, "output": 2.0},  # USD per million tokens
        error_policy=ErrorPolicy.retry_tool_errors(3),
    )


chat = solver("openai")
responses = solver("openai-responses")
messages = solver("anthropic")
content = solver("google")
converse = solver("bedrock")
