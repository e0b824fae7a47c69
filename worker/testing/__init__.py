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
    from stepfleet.worker.testing.openai.requests import RequestRecord as RequestRecord
    from stepfleet.worker.testing.openai.requests import ToolAnswer as ToolAnswer
    from stepfleet.worker.testing.rate_limits import RateLimit as RateLimit
    from stepfleet.worker.testing.rules import NoReplyError as NoReplyError
    from stepfleet.worker.testing.rules import Rules as Rules
    from stepfleet.worker.testing.rules import RulesNotFoundError as RulesNotFoundError
    from stepfleet.worker.testing.rules import Said as Said
    from stepfleet.worker.testing.rules import load_rules as load_rules
    from stepfleet.worker.testing.scenario import Fault as Fault
    from stepfleet.worker.testing.scenario import FaultKind as FaultKind
    from stepfleet.worker.testing.scenario import Faults as Faults
    from stepfleet.worker.testing.scenario import Latency as Latency
    from stepfleet.worker.testing.scenario import Planned as Planned
    from stepfleet.worker.testing.scenario import Quirk as Quirk
    from stepfleet.worker.testing.scenario import Reply as Reply
    from stepfleet.worker.testing.scenario import ToolCallReply as ToolCallReply
    from stepfleet.worker.testing.scenario import Usage as Usage
    from stepfleet.worker.testing.scripted import Scripted as Scripted
    from stepfleet.worker.testing.scripted import ScriptError as ScriptError
    from stepfleet.worker.testing.scripted import call as call
    from stepfleet.worker.testing.server import ModelServer as ModelServer
    from stepfleet.worker.testing.service import RequestLog as RequestLog

_WHERE = {
    "service": "RequestLog",
    "openai.requests": "RequestRecord ToolAnswer",
    "rules": "NoReplyError Rules RulesNotFoundError Said load_rules",
    "scenario": "Fault FaultKind Faults Planned Latency Quirk Reply ToolCallReply Usage",
    "rate_limits": "RateLimit",
    "scripted": "Scripted ScriptError call",
    "server": "ModelServer",
}
_MODULES = {name: module for module, names in _WHERE.items() for name in names.split()}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
