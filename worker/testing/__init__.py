"""A scripted model behind real HTTP, for the tests of those who write agents, and for our own.

`ModelServer` speaks the OpenAI protocol, checks every conversation that it receives, and fails on
purpose where faults are planned. `python -m stepfleet.worker.testing` runs it as a program; the
pytest fixture is in `stepfleet.worker.testing.fixtures`.
"""

from stepfleet.worker.testing.http.request_log import RequestLog
from stepfleet.worker.testing.openai.requests import RequestRecord, ToolAnswer
from stepfleet.worker.testing.rules import NoReplyError, Rules, RulesNotFoundError, Said, load_rules
from stepfleet.worker.testing.scenario.faults import Fault, FaultKind, Faults, Planned
from stepfleet.worker.testing.scenario.latency import Latency
from stepfleet.worker.testing.scenario.replies import Quirk, Reply, ToolCallReply, Usage
from stepfleet.worker.testing.server import ModelServer

__all__ = [
    # the server
    "ModelServer",
    "RequestLog",
    # replies of the model
    "Reply",
    "ToolCallReply",
    "Usage",
    "Quirk",
    "Rules",
    "Said",
    "load_rules",
    "NoReplyError",
    "RulesNotFoundError",
    # requests
    "RequestRecord",
    "ToolAnswer",
    # failures and delays
    "Fault",
    "FaultKind",
    "Faults",
    "Planned",
    "Latency",
]
