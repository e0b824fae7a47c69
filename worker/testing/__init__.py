"""A scripted model, in process or behind real HTTP, for the tests of those who write agents.

`Scripted` runs an agent against a list of replies: the pytest fixture `scripted`. `ModelServer`
speaks the protocols of the built-in providers, checks every conversation that it receives, and
fails on purpose where faults are planned; `python -m stepfleet.worker.testing` runs it as a
program. The public names are imported at their first use: pytest loads the fixtures of an installed
package at its every start.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepfleet.worker.testing.http.request_log import RequestLog as RequestLog
    from stepfleet.worker.testing.openai.requests import RequestRecord as RequestRecord
    from stepfleet.worker.testing.openai.requests import ToolAnswer as ToolAnswer
    from stepfleet.worker.testing.rules import NoReplyError as NoReplyError
    from stepfleet.worker.testing.rules import Rules as Rules
    from stepfleet.worker.testing.rules import RulesNotFoundError as RulesNotFoundError
    from stepfleet.worker.testing.rules import Said as Said
    from stepfleet.worker.testing.rules import load_rules as load_rules
    from stepfleet.worker.testing.scenario.faults import Fault as Fault
    from stepfleet.worker.testing.scenario.faults import FaultKind as FaultKind
    from stepfleet.worker.testing.scenario.faults import Faults as Faults
    from stepfleet.worker.testing.scenario.faults import Planned as Planned
    from stepfleet.worker.testing.scenario.latency import Latency as Latency
    from stepfleet.worker.testing.scenario.limits import RateLimit as RateLimit
    from stepfleet.worker.testing.scenario.replies import Quirk as Quirk
    from stepfleet.worker.testing.scenario.replies import Reply as Reply
    from stepfleet.worker.testing.scenario.replies import ToolCallReply as ToolCallReply
    from stepfleet.worker.testing.scenario.replies import Usage as Usage
    from stepfleet.worker.testing.scripted import Scripted as Scripted
    from stepfleet.worker.testing.scripted import ScriptError as ScriptError
    from stepfleet.worker.testing.scripted import call as call
    from stepfleet.worker.testing.server import ModelServer as ModelServer

_WHERE = {
    "server": "ModelServer",
    "scripted": "Scripted ScriptError call",
    "http.request_log": "RequestLog",
    "scenario.replies": "Reply ToolCallReply Usage Quirk",
    "rules": "Rules Said load_rules NoReplyError RulesNotFoundError",
    "openai.requests": "RequestRecord ToolAnswer",
    "scenario.faults": "Fault FaultKind Faults Planned",
    "scenario.latency": "Latency",
    "scenario.limits": "RateLimit",
}
_MODULES = {name: module for module, names in _WHERE.items() for name in names.split()}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
