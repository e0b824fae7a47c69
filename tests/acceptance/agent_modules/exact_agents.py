"""Agents whose calls and answers have amounts in wei: whole numbers beyond 64 bits."""

from typing import Any

from stepfleet.orchestrator import Agent, tool

WEI: dict[str, Any] = {
    "title": "Amount",
    "type": "object",
    "properties": {"wei": {"type": "integer"}},
    "required": ["wei"],
}


@tool(read_only=True)
def double(wei: int) -> dict[str, int]:
    """Return twice an amount."""
    return {"wei": 2 * wei}


@tool(approval=True)
def pay(wei: int) -> str:
    """Pay an amount."""
    return f"paid {wei}"


ledger = Agent("ledger", model="openai:scripted", output_type=WEI, max_steps=3)
treasurer = Agent(
    "treasurer",
    model="openai:scripted",
    tools=[double, pay, ledger.as_tool(input_type=WEI)],
    prompt="Settle {wei} at {rate}.",
    output_type=WEI,
    broadcast="debug",
    memory={"summarize_after": 200},
    max_steps=6,
)
