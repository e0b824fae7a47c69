"""The agent of `compare.py`: a file that earlier versions of Stepfleet load as well."""

from stepfleet.orchestrator import Agent, tool

_PASSAGE = "A sentence of some sixty characters, as a page of text has it. " * 5


@tool
def look(step: int) -> str:
    """Return a passage about the question; the conversation grows by it."""
    return f"Passage {step}. {_PASSAGE}"


answerer = Agent(
    "answerer", model="openai:benchmark", tools=[look], max_steps=1000, token_limit=None
)
