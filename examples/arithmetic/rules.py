"""A simulated model that solves the problems of `problems.py` as a language model would.

It sees only the conversation: reads the question sentence by sentence, asks the calculator one
calculation at a time (two at once where they are independent), and goes on with the results.
"""

import re
from collections.abc import Generator

from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply

# What is yielded is to be calculated; what comes back are the values, in that order.
Work = Generator[tuple[str, ...], tuple[int, ...], int]

_QUESTION = re.compile(r"How many (?P<things>\w+) does (?P<person>\w+) have in the end\?")
_START = re.compile(r"starts with (\d+) \w+\.")
_BOXES = re.compile(r"fills (\d+) boxes with (\d+) \w+ each\.")
_BOXES_AND_BAGS = re.compile(r"packs (\d+) boxes with (\d+) \w+ each and (\d+) bags with (\d+)")
_CRATES = re.compile(r"delivers (\d+) crates of (\d+)\.")
_CHANGES = (
    (re.compile(r"brings (\d+) more\."), "+"),
    (re.compile(r"Then (\d+) of them are sold\."), "-"),
    (re.compile(r"becomes (\d+) times as large\."), "*"),
    (re.compile(r"divided equally among (\d+) friends"), "/"),
)


def rules(request: RequestRecord) -> Reply:
    """Ask for the next calculation, or say the answer."""
    question = _QUESTION.search(request.question)
    if question is None:
        return Reply("I only solve problems like those of problems.py.")
    known = _results(request)
    work = _solve(request.question)
    try:
        wanted = next(work)
        while all(one in known for one in wanted):
            wanted = work.send(tuple(known[one] for one in wanted))
    except StopIteration as done:
        person, things = question["person"], question["things"]
        return Reply(f"{person} has {done.value} {things} in the end.")
    calls = (ToolCallReply("calculator", {"expression": one}) for one in wanted if one not in known)
    return Reply(tool_calls=tuple(calls))


def _results(request: RequestRecord) -> dict[str, int]:
    """Return what the calculator has said; a failed calculation is asked for again."""
    results: dict[str, int] = {}
    for answer in request.answers:
        try:
            results[str(answer.arguments.get("expression"))] = round(float(answer.content))
        except ValueError:
            continue
    return results


def _solve(question: str) -> Work:
    value = 0
    for sentence in re.split(r"(?<=\.) ", question):
        value = yield from _after(sentence, value)
    return value


def _after(sentence: str, value: int) -> Work:
    """Work out how many things there are after a sentence."""
    if start := _START.search(sentence):
        return int(start[1])
    if boxes := _BOXES.search(sentence):
        return (yield (f"{boxes[1]} * {boxes[2]}",))[0]
    if both := _BOXES_AND_BAGS.search(sentence):
        first, second = yield f"{both[1]} * {both[2]}", f"{both[3]} * {both[4]}"
        return (yield (f"{first} + {second}",))[0]
    if crates := _CRATES.search(sentence):
        (delivered,) = yield (f"{crates[1]} * {crates[2]}",)
        return (yield (f"{value} + {delivered}",))[0]
    for pattern, sign in _CHANGES:
        if change := pattern.search(sentence):
            return (yield (f"{value} {sign} {change[1]}",))[0]
    return value
