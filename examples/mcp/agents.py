"""An agent with the tools of an MCP server, which each worker starts for itself."""

import sys
from pathlib import Path

from stepfleet import Agent, ErrorPolicy, mcp_server

library = mcp_server(
    "library",
    command=[sys.executable, str(Path(__file__).resolve().parent / "server.py")],
    read_only=["search", "book"],
    timeout=20,
)

librarian = Agent(
    name="librarian",
    model="openai:gpt-4o-mini",
    instructions=(
        "You answer questions about the library's books in one sentence. Look every fact up; "
        "search by author where you do not know a title."
    ),
    tools=[library],
    max_steps=8,
    budget_usd=0.05,
    error_policy=ErrorPolicy.retry_tool_errors(3),
)
