"""Agents with tools of MCP servers: started by each worker, and reached at an address."""

import os
import sys
from pathlib import Path

from stepfleet.orchestrator import Agent, ErrorPolicy, mcp_server, tool

TALKER = str(Path(__file__).parents[2] / "support" / "servers" / "mcp_talker.py")


@tool
def person(name: str) -> str:
    """Tell of a person, as the agent knows them."""
    return f"own {name}"


near = Agent(
    "near",
    model="openai:scripted",
    tools=[
        person,
        mcp_server(
            "talker",
            command=[sys.executable, TALKER, "stdio"],
            env=["NOTES", "SERVER_KEY"],
            timeout=60,
            read_only=["look"],
        ),
    ],
    error_policy=ErrorPolicy.retry_tool_errors(3),
)
far = Agent(
    "far",
    model="openai:scripted",
    tools=[mcp_server("talker", url=os.environ.get("TALKER_URL", "http://127.0.0.1:9/mcp"))],
    model_attempts=100,
)
