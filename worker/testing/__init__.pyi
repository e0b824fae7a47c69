# What tests import from `stepfleet.worker.testing`, each name once: `__init__.py` reads this file.

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
