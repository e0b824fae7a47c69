"""Agents that reason by strategies and plans, for the acceptance tests."""

from stepfleet.orchestrator import Agent, Planning, StateUpdate, current_invocation, tool


@tool(read_only=True, thread=False)
def look(what: str) -> str:
    """Look something up."""
    return f"seen {what}"


@tool(thread=False)
def note(what: str) -> StateUpdate:
    """Note something down."""
    notes = [*current_invocation().custom_state.get("notes", []), what]
    return StateUpdate(f"{len(notes)} notes", custom_state={"notes": notes})


MODEL = "openai:scripted"
TEMPLATE = "Question: {prompt}\nSo far:\n{history}"

react = Agent(
    "react", model=MODEL, tools=[look, note], strategy="react", strategy_options={"verbose": True}
)
worded = Agent("worded", model=MODEL, tools=[look], strategy="react", user_template=TEMPLATE)
native = Agent(
    "native", model=MODEL, tools=[look], strategy="react", strategy_options={"mode": "text"}
)
chain = Agent("chain", model=MODEL, strategy="chain_of_thought")
careful = Agent(
    "careful", model=MODEL, strategy="careful_strategy:Careful", strategy_options={"checks": 2}
)
planner = Agent("planner", model=MODEL, tools=[look], planning=Planning(every=2))
