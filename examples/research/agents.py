"""An agent that researches questions in a folder of documents, with tools that may fail."""

import asyncio
import re
from pathlib import Path

from stepfleet import Agent, ErrorPolicy, tool

DOCUMENTS = Path(__file__).resolve().parent / "documents"
NO_STATISTICS = frozenset({"lighthouses", "pigeons", "tides"})
CHECKING_SECONDS = 0.5


@tool(read_only=True)
def search_documents(query: str, limit: int = 3) -> list[str]:
    """Find documents about a topic; the best first.

    Args:
        query: Words to look for.
        limit: How many documents to name at most.

    Returns:
        The ids of the documents.
    """
    wanted = _words(query)
    scores = {name: _score(name, wanted) for name in _names()}
    found = sorted((name for name in scores if scores[name]), key=lambda name: -scores[name])
    return found[:limit]


@tool(read_only=True)
def read_document(document_id: str) -> str:
    """Return the whole text of a document.

    Args:
        document_id: An id that search_documents has named.
    """
    return _text(document_id)


@tool(read_only=True)
def word_count(document_id: str) -> int:
    """Return how many words a document has.

    Args:
        document_id: An id that search_documents has named.
    """
    return len(re.findall(r"[\w']+", _text(document_id)))


@tool(read_only=True)
def compare_documents(first: str, second: str) -> dict[str, list[str]]:
    """Return the longer words that two documents share, and those that only one has.

    Args:
        first: The id of a document.
        second: The id of another document.
    """
    one, other = (
        {word for word in _words(_text(name)) if len(word) > 4}  # noqa: PLR2004 - skips "with", "that"
        for name in (first, second)
    )
    return {
        "both": sorted(one & other),
        "only_first": sorted(one - other)[:10],
        "only_second": sorted(other - one)[:10],
    }


@tool(read_only=True)
def fetch_statistics(topic: str) -> dict[str, int]:
    """Return figures on a topic from the statistics service, which does not know every topic.

    Args:
        topic: The topic, in the words of a document id.
    """
    if topic in NO_STATISTICS:
        raise LookupError(f"the statistics service has no figures on {topic!r}")
    text = _text(topic)
    return {"sentences": text.count("."), "letters": sum(map(str.isalpha, text))}


@tool(read_only=True, timeout=10)
async def check_sources(document_id: str) -> str:
    """Have the sources of a document checked. Takes a while.

    Args:
        document_id: An id that search_documents has named.
    """
    text = _text(document_id)
    await asyncio.sleep(CHECKING_SECONDS)
    return f"{text.count('.')} statements checked, none contradicted"


researcher = Agent(
    name="researcher",
    model="openai:gpt-4o-mini",
    instructions=(
        "You answer questions from a collection of documents. Search first, then read what you "
        "found; say only what the documents say. When a tool fails, find another way. Answer in "
        "one or two sentences, and name the documents that you used."
    ),
    tools=[
        search_documents,
        read_document,
        word_count,
        compare_documents,
        fetch_statistics,
        check_sources,
    ],
    max_steps=12,
    cumulative_timeout=120,
    budget_usd=0.05,
    error_policy=ErrorPolicy.retry_tool_errors(3),
)


def _names() -> list[str]:
    return sorted(path.stem for path in DOCUMENTS.glob("*.md"))


def _text(document_id: str) -> str:
    if document_id not in _names():
        raise LookupError(f"there is no document {document_id!r}; there are {', '.join(_names())}")
    return (DOCUMENTS / f"{document_id}.md").read_text(encoding="utf-8")


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z']+", text.lower()))


def _score(name: str, wanted: set[str]) -> int:
    """Return how well a document fits: words of its title count ten times."""
    return 10 * len(wanted & _words(name)) + len(wanted & _words(_text(name)))
