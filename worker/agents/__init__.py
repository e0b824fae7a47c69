"""Agents as a worker has them: their code, their MCP servers, cached and streamed answers."""
