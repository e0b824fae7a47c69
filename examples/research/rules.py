"""A simulated model that researches the questions of `questions.jsonl` with the agent's tools.

It sees only the conversation. Each kind of question has a plan; a plan yields the calls that it
needs next, gets what they returned (or `FAILED`), and returns the final sentence.
"""

import json
import re
from collections.abc import Callable, Generator

from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply

Call = tuple[str, dict[str, object]]
Plan = Generator[tuple[Call, ...], tuple[str, ...], str]

FAILED = "Error: "
"""How the answer of a tool that failed begins."""
MAY_FAIL = frozenset({"fetch_statistics"})
"""Tools whose failure has another way round it; failed calls of others are made again."""


def rules(request: RequestRecord) -> Reply:
    """Ask for the next calls of the question's plan, or give its answer."""
    known = {
        _key(one.name, one.arguments): one.content
        for one in request.answers
        if not one.content.startswith(FAILED) or one.name in MAY_FAIL
    }
    plan = _plan(request.question)
    try:
        wanted = next(plan)
        while all(_key(*one) in known for one in wanted):
            wanted = plan.send(tuple(known[_key(*one)] for one in wanted))
    except StopIteration as done:
        return Reply(str(done.value))
    missing = (one for one in wanted if _key(*one) not in known)
    return Reply(tool_calls=tuple(ToolCallReply(name, arguments) for name, arguments in missing))


def _plan(question: str) -> Plan:
    for pattern, plan in _PLANS:
        if asked := re.fullmatch(pattern, question):
            return (yield from plan(*asked.groups()))
    return "I only answer questions like those of questions.jsonl."


def _describe(topic: str) -> Plan:
    (name,) = yield from _find(topic)
    (text,) = yield (("read_document", {"document_id": name}),)
    return f"{_first_sentence(text)} (Document: {name}.)"


def _compare(first: str, second: str) -> Plan:
    one, other = yield from _find(first, second)
    texts = yield (
        ("read_document", {"document_id": one}),
        ("read_document", {"document_id": other}),
    )
    (compared,) = yield (("compare_documents", {"first": one, "second": other}),)
    shared = json.loads(compared)["both"]
    words = ", ".join(shared) or "no longer words"
    lengths = " and ".join(str(len(text)) for text in texts)
    return f"The documents {one} and {other} share {words}; they have {lengths} characters."


def _figures(topic: str) -> Plan:
    (name,) = yield from _find(topic)
    (figures,) = yield (("fetch_statistics", {"topic": name}),)
    if figures.startswith(FAILED):
        (words,) = yield (("word_count", {"document_id": name}),)
        return f"There are no statistics on {name}; its document has {words} words."
    counted = json.loads(figures)
    return f"On {name} there are {counted['sentences']} sentences, {counted['letters']} letters."


def _check(topic: str) -> Plan:
    (name,) = yield from _find(topic)
    text, checked = yield (
        ("read_document", {"document_id": name}),
        ("check_sources", {"document_id": name}),
    )
    return f"On {name}: {checked}. It begins: {_first_sentence(text)}"


def _find(*topics: str) -> Generator[tuple[Call, ...], tuple[str, ...], tuple[str, ...]]:
    """Search for each topic, all at once, and return the best document of each."""
    found = yield tuple(("search_documents", {"query": topic}) for topic in topics)
    return tuple(str(json.loads(one)[0]) for one in found)


def _first_sentence(text: str) -> str:
    body = text.split("\n\n", maxsplit=1)[-1]
    return body.partition(". ")[0] + "."


def _key(name: str, arguments: object) -> tuple[str, str]:
    return name, json.dumps(arguments, sort_keys=True)


_PLANS: tuple[tuple[str, Callable[..., Plan]], ...] = (
    (r"What do the documents say about ([\w ]+)\?", _describe),
    (r"What have ([\w ]+) and ([\w ]+) in common\?", _compare),
    (r"Which figures are there on ([\w ]+)\?", _figures),
    (r"Are the sources on ([\w ]+) sound\?", _check),
)
