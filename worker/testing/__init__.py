"""A scripted model behind real HTTP, for the tests of those who write agents, and for our own.

`ModelServer` speaks the OpenAI protocol, checks every conversation it is sent, and fails on
purpose when told to. `python -m stepfleet.worker.testing` runs it as a program; the pytest
fixture is in `stepfleet.worker.testing.fixtures`.
"""

from stepfleet.worker.testing.chat.faults import Fault, FaultKind, Faults, Planned
from stepfleet.worker.testing.chat.quirks import Quirk
from stepfleet.worker.testing.chat.replies import Reply, ToolCallReply, Usage
from stepfleet.worker.testing.chat.requests import RequestRecord, ToolAnswer
from stepfleet.worker.testing.http.request_log import RequestLog
from stepfleet.worker.testing.loading import RulesNotFoundError, load_rules
from stepfleet.worker.testing.scenario.latency import Latency
from stepfleet.worker.testing.scenario.scripts import NoReplyError, Rules, Said
from stepfleet.worker.testing.server import ModelServer

__all__ = [
    # the server
    "ModelServer",
    "RequestLog",
    # what the model says
    "Reply",
    "ToolCallReply",
    "Usage",
    "Quirk",
    "Rules",
    "Said",
    "load_rules",
    "NoReplyError",
    "RulesNotFoundError",
    # what it is asked
    "RequestRecord",
    "ToolAnswer",
    # how it fails
    "Fault",
    "FaultKind",
    "Faults",
    "Planned",
    "Latency",
]
