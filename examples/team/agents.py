"""An editor who has two agents of their own trades work for it: each call is a run of its own.

The editor waits for them without a slot; its run shows what they did, and what they cost. The
reception hands its runs over: an agent of the house, or the editor, goes on with them.
"""

from stepfleet import Agent

researcher = Agent(
    "researcher",
    model="openai:gpt-4o-mini",
    instructions="Find the one most important fact about a subject. Answer with that fact.",
)

critic = Agent(
    "critic",
    model="openai:gpt-4o-mini",
    instructions="You read like a ten-year-old.",
    prompt="What would you ask {reader} about {subject}? Ask one question.",
)

editor = Agent(
    "editor",
    model="openai:gpt-4o",
    instructions="Have the subject researched and questioned, then write two sentences.",
    agents=[researcher],
    tools=[critic.as_tool(description="Asks what readers of that age would ask.")],
    parallel_tool_execution=True,
)

archive = Agent(
    "archive",
    model="openai:gpt-4o-mini",
    instructions="You know which issue of our magazine a text was in.",
)

reception = Agent(
    "reception",
    model="openai:gpt-4o-mini",
    instructions="You are the reception. Hand over to whoever can help.",
    handoffs=[editor, archive.as_handoff(description="Knows what was printed, and when.")],
    max_steps=8,
)
