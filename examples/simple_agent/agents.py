"""The smallest agent: a name, a model and an instruction. Each of its runs is one step."""

from stepfleet import Agent

crier = Agent(
    "crier",
    model="openai:gpt-4o-mini",
    instructions="Repeat the user's sentence in capital letters. Say nothing else.",
)
