"""The prompts of planning turns. Pure text; knows no runs and no providers."""

from collections.abc import Iterable, Sequence

from stepfleet.orchestrator.agents.planning.plan import Plan
from stepfleet.orchestrator.records.tools import ToolSpec

NO_TOOLS = "no tools are available"

_FORM = (
    "Write the plan as a numbered list, one step per line, each with its state in brackets: "
    "[ ] pending, [~] in progress, [x] completed, [!] blocked."
)


def initial_prompt(task: str, tools: Iterable[ToolSpec]) -> str:
    """Return the prompt for an approach to `task`, sent before the first step."""
    return (
        f"Task: {task}\n"
        f"Tools: {_names(tools)}.\n"
        "Before you act: what is your approach? Do not solve the task yet. "
        f"{_FORM}"
    )


def next_prompt(
    task: str, iteration: int, tools: Iterable[ToolSpec], plan: Plan | None = None
) -> str:
    """Return the prompt for the next step of `task`, in iteration `iteration` (from 1)."""
    known = f"Your plan so far:\n{plan.as_text()}\n" if plan and plan.steps else ""
    return (
        f"Task: {task}\n"
        f"This is iteration {iteration}. Tools: {_names(tools)}.\n"
        f"{known}"
        "From your observations so far: what is the next step? Do not act yet; bring the plan up "
        f"to date. {_FORM}"
    )


def tools_prompt(tools: Sequence[ToolSpec]) -> str:
    """Return one line per tool, its name and description, under a heading."""
    if not tools:
        return f"Tools: {NO_TOOLS}."
    lines = [f"- {tool.name}: {' '.join(tool.description.split())}".rstrip(": ") for tool in tools]
    return "\n".join(["Tools:", *lines])


def _names(tools: Iterable[ToolSpec]) -> str:
    return ", ".join(tool.name for tool in tools) or NO_TOOLS
