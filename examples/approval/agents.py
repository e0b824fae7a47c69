"""A clerk whose large refunds wait for a person's approval; the small ones are paid at once.

A run that waits has no slot and no message. Here nobody decides, so that the time limit does.
"""

from stepfleet import Agent, ToolInvocation, tool

LARGE = 100.0


def is_large(invocation: ToolInvocation) -> bool:
    """Say whether a refund needs an approval: from 100 euros on."""
    return float(invocation.arguments["euros"]) >= LARGE


@tool(approval=is_large, approval_timeout=1.0, approval_default="deny")
def refund(customer: str, euros: float) -> str:
    """Pay money back.

    Args:
        customer: Who gets it.
        euros: How much.
    """
    return f"{euros:g} euros paid to {customer}"


clerk = Agent(
    "clerk",
    model="openai:gpt-4o-mini",
    instructions="Refund what customers ask for. Say what came of it, in one sentence.",
    tools=[refund],
)
