"""Agents of the runs in `recovery/earlier_records.json`; their tools and the model are as then."""

from stepfleet import Agent, ErrorPolicy, ask_person, tool
from stepfleet.worker.testing import Reply, RequestRecord, ToolCallReply

TOOLS = {
    "look": ("look", "what"),
    "refund": ("refund", "customer"),
    "ask": ("ask_person", "question"),
    "render": ("render", "what"),
    "check": ("checker", "input"),
}
"""The tool that a question's first word makes the model call, and the argument it gives."""


@tool(read_only=True, thread=False)
def look(what: str) -> str:
    """Look something up."""
    return f"seen {what}"


@tool(approval=True)
def refund(customer: str) -> str:
    """Pay money back."""
    return f"paid {customer}"


@tool(queue="gpu", timeout=60)
def render(what: str) -> str:
    """Work on a queue of its own."""
    return f"rendered {what}"


checker = Agent("checker", model="openai:scripted", tools=[refund], time_limit=None)
clerk = Agent(
    "clerk",
    model="openai:scripted",
    agents=[checker],
    tools=[look, refund, render, ask_person],
    error_policy=ErrorPolicy.retry_tool_errors(3),
    time_limit=None,
)
limited = Agent("limited", model="openai:limited", tools=[look], time_limit=None)
TURNS = 3


def rules(request: RequestRecord) -> Reply:
    """Call the tool of the question, `look` twice, and answer with what it said."""
    word, _, rest = request.question.partition(" ")
    answers = request.answers
    if word in TOOLS and len(answers) < (TURNS - 1 if word == "look" else 1):
        name, argument = TOOLS[word]
        given = f"refund {rest}" if word == "check" else rest
        return Reply(tool_calls=(ToolCallReply(name, {argument: given}),))
    return Reply(f"done: {answers[-1].content if answers else rest}")
