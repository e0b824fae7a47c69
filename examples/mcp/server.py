"""An MCP server with the shelves of a small library. Started by each worker; see `agents.py`."""

from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

BOOKS = {
    "Middlemarch": {"author": "George Eliot", "year": 1871, "shelf": "E2", "copies": 3},
    "Walden": {"author": "Henry David Thoreau", "year": 1854, "shelf": "T1", "copies": 0},
    "Emma": {"author": "Jane Austen", "year": 1815, "shelf": "A1", "copies": 2},
    "Persuasion": {"author": "Jane Austen", "year": 1817, "shelf": "A1", "copies": 1},
}
READS = ToolAnnotations(read_only_hint=True)

server = MCPServer("library", log_level="ERROR")


@server.tool(annotations=READS)
def search(author: str) -> list[str]:
    """Return the titles of an author's books."""
    return sorted(title for title, book in BOOKS.items() if book["author"] == author)


@server.tool(annotations=READS)
def book(title: str) -> dict[str, Any]:
    """Return author, year, shelf and the number of copies that are there."""
    if title not in BOOKS:
        raise ToolError(f"there is no book {title!r}; search by author")
    return BOOKS[title]


if __name__ == "__main__":
    server.run("stdio")
