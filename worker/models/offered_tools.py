"""Names of calls as the tools on offer have them. Pure.

Servers that read calls out of a model's text may leave its marks in their names: gpt-oss's
namespace and channel, as `functions.look` and `look<|channel|>commentary`, or Kimi's number, as
`functions.look:0`.
"""

import re
from collections.abc import Iterable

from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolSpec
from stepfleet.orchestrator.records.responses import LLMResponse

_MARKED = re.compile(r"(?:functions\.)?(.*?)(?::\d{1,4})?(?:<\|.*)?", re.DOTALL)


def with_offered_names(answer: LLMResponse, tools: Iterable[ToolSpec]) -> LLMResponse:
    """Return an answer whose calls have no marks in their names, where a tool is meant."""
    calls = answer.tool_calls or ()
    offered = {one.name for one in tools}
    if all(call.name in offered for call in calls):
        return answer
    return answer.model_copy(update={"tool_calls": tuple(_named(call, offered) for call in calls)})


def _named(call: ToolCall, offered: set[str]) -> ToolCall:
    found = _MARKED.fullmatch(call.name)
    meant = found[1].strip() if found else ""
    if call.name in offered or meant not in offered:
        return call
    return call.model_copy(update={"name": meant})
