"""An editor who has researchers and a critic look things up, and they their own helpers."""

from stepfleet.orchestrator import Agent, ErrorPolicy

checker = Agent("checker", model="openai:scripted", instructions="Check one fact.")
researcher = Agent(
    "researcher", model="openai:scripted", instructions="Look one thing up.", agents=[checker]
)
critic = Agent("critic", model="openai:scripted", prompt="Criticize {text} for {reader}")
editor = Agent(
    "editor",
    model="openai:scripted",
    agents=[researcher, critic],
    parallel_tool_execution=True,
    time_limit=None,
    error_policy=ErrorPolicy.ignore_tool_errors(),
)
