"""An agent that solves word problems with a calculator."""

from stepfleet import Agent, ErrorPolicy, calculator

solver = Agent(
    name="solver",
    model="openai:gpt-4o-mini",
    instructions=(
        "You solve arithmetic word problems. Do every calculation with the calculator, one "
        "operation at a time; call it several times at once where the operations are independent. "
        "When you know the result, answer in one sentence that contains the number."
    ),
    tools=[calculator],
    max_steps=12,
    cumulative_timeout=120,
    budget_usd=0.05,
    error_policy=ErrorPolicy.retry_tool_errors(3),
)
