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

policy = ErrorPolicy.ignore_tool_errors()
level_5 = Agent("level_5", model="openai:gpt-4o-mini")
level_4 = Agent("level_4", model="openai:gpt-4o-mini", agents=[level_5], error_policy=policy)
level_3 = Agent("level_3", model="openai:gpt-4o-mini", agents=[level_4])
level_2 = Agent("level_2", model="openai:gpt-4o-mini", agents=[level_3])
level_1 = Agent("level_1", model="openai:gpt-4o-mini", agents=[level_2])
