"""Tools that many tests give to their agents."""

from stepfleet.orchestrator import tool


@tool(read_only=True)
def look(what: str) -> str:
    """Look something up."""
    return f"seen {what}"


@tool
def broken() -> str:
    """Fail."""
    message = "no luck"
    raise ValueError(message)
