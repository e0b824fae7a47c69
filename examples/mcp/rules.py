"""A simulated model that answers the questions of `questions.jsonl` with the library's tools."""

import json
import re

from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply

_WHERE = re.compile(r"Where do I find (.+)\?")
_OLDEST = re.compile(r"Which is the oldest book of (.+)\?")


def rules(request: RequestRecord) -> Reply:
    """Look the books of the question up, then answer."""
    if asked := _WHERE.fullmatch(request.question):
        return _where(asked[1], request)
    if asked := _OLDEST.fullmatch(request.question):
        return _oldest(asked[1], request)
    return Reply("I only answer questions like those of questions.jsonl.")


def _where(title: str, request: RequestRecord) -> Reply:
    if not request.answers:
        return Reply(tool_calls=(ToolCallReply("book", {"title": title}),))
    said = request.answers[-1].content
    if said.startswith("Error: "):
        return Reply(f"The library does not have {title}.")
    book = json.loads(said)
    place = f"on shelf {book['shelf']}" if book["copies"] else "nowhere: all copies are lent"
    return Reply(f"{title} is {place}.")


def _oldest(author: str, request: RequestRecord) -> Reply:
    if not request.answers:
        return Reply(tool_calls=(ToolCallReply("search", {"author": author}),))
    titles = json.loads(request.answers[0].content)
    if len(request.answers) == 1:
        return Reply(tool_calls=tuple(ToolCallReply("book", {"title": one}) for one in titles))
    years = [json.loads(one.content)["year"] for one in request.answers[1:]]
    year, title = min(zip(years, titles, strict=True))
    return Reply(f"{title}, of {year}, is the oldest book of {author}.")
