"""A question to a person: the run waits for the answer without a slot, for days if need be."""

from typing import Any, NoReturn

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.calls.answers import Awaited
from stepfleet.orchestrator.tools.definition import Tool, tool


@tool(name="ask_person", idempotent=True, queue=Awaited.PERSON)
def _ask(question: str, options: list[str] | None = None) -> NoReturn:
    """Ask a person, and wait for the answer, however long it takes.

    Args:
        question: What you need to know, so that somebody can answer who has not seen the rest.
        options: The possible answers, if it must be one of them.
    """
    del question, options
    raise ConfigurationError("ask_person is answered by `stepfleet decide --answer`, on a fleet")


ask_person: Tool[..., Any] = _ask
