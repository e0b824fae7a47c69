"""Decides what happens. Imports no worker. The public names are here, imported at their first use.

Rooms, from top to bottom:

- `cli`: the command line
- `dashboard`: pages and a JSON API in Flower
- `client`: `Fleet` and `AsyncFleet`, what users call
- `batches`: files of lines to runs to results
- `store`: the only code that reads and writes runs in Redis; Lua scripts
- `protocol`: one step as values: claim, attempt, verdict, fold
- `agents`: what an agent is and where it comes from
- `events`, `models`, `settings`: envelopes and their way out; a model's interface, address, prices
- `memory`, `redis_client`, `tools`: what is sent of a conversation; connections; what a tool is
- `continuation`, `limits`, `references`: whether a run goes on; what is shared; imports by name
- `errors`: the exceptions
- `records`: frozen values: messages, state, steps, usage, results
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepfleet.orchestrator.agents.agent import Agent as Agent
    from stepfleet.orchestrator.agents.answers import Continue as Continue
    from stepfleet.orchestrator.agents.answers import ReturnAnswer as ReturnAnswer
    from stepfleet.orchestrator.agents.answers import ReturnResult as ReturnResult
    from stepfleet.orchestrator.agents.answers import SpecialTool as SpecialTool
    from stepfleet.orchestrator.agents.builder import AgentBuilder as AgentBuilder
    from stepfleet.orchestrator.agents.config import AgentConfig as AgentConfig
    from stepfleet.orchestrator.agents.config import AgentKeywords as AgentKeywords
    from stepfleet.orchestrator.agents.config import RunOverrides as RunOverrides
    from stepfleet.orchestrator.agents.loader import agents_of_file as agents_of_file
    from stepfleet.orchestrator.agents.loader import builder_of as builder_of
    from stepfleet.orchestrator.agents.planning import Planning as Planning
    from stepfleet.orchestrator.agents.strategies import ChainOfThought as ChainOfThought
    from stepfleet.orchestrator.agents.strategies import NoOp as NoOp
    from stepfleet.orchestrator.agents.strategies import ReAct as ReAct
    from stepfleet.orchestrator.agents.strategies import StateChange as StateChange
    from stepfleet.orchestrator.agents.strategies import Strategy as Strategy
    from stepfleet.orchestrator.agents.strategies import StrategyContext as StrategyContext
    from stepfleet.orchestrator.agents.sub_agents import AgentTool as AgentTool
    from stepfleet.orchestrator.agents.sub_agents import HandoffTool as HandoffTool
    from stepfleet.orchestrator.batches.check import BatchCheck as BatchCheck
    from stepfleet.orchestrator.batches.check import LineProblem as LineProblem
    from stepfleet.orchestrator.batches.failures import FailureGroup as FailureGroup
    from stepfleet.orchestrator.batches.failures import Failures as Failures
    from stepfleet.orchestrator.batches.files.tables import ResultTable as ResultTable
    from stepfleet.orchestrator.client.approvals import (
        AsyncFleetApprovals as AsyncFleetApprovals,
    )
    from stepfleet.orchestrator.client.approvals import DecideOptions as DecideOptions
    from stepfleet.orchestrator.client.batch import AsyncBatch as AsyncBatch
    from stepfleet.orchestrator.client.batch import AsyncFleetBatches as AsyncFleetBatches
    from stepfleet.orchestrator.client.batch import ThenOptions as ThenOptions
    from stepfleet.orchestrator.client.blocking import Batch as Batch
    from stepfleet.orchestrator.client.blocking import Fleet as Fleet
    from stepfleet.orchestrator.client.blocking import FleetApprovals as FleetApprovals
    from stepfleet.orchestrator.client.blocking import FleetBatches as FleetBatches
    from stepfleet.orchestrator.client.blocking import FleetCache as FleetCache
    from stepfleet.orchestrator.client.blocking import FleetHistory as FleetHistory
    from stepfleet.orchestrator.client.blocking import FleetLimits as FleetLimits
    from stepfleet.orchestrator.client.blocking import FleetRuns as FleetRuns
    from stepfleet.orchestrator.client.blocking import FleetSchedules as FleetSchedules
    from stepfleet.orchestrator.client.cache import AsyncFleetCache as AsyncFleetCache
    from stepfleet.orchestrator.client.checkpoints import AgentCheckpoint as AgentCheckpoint
    from stepfleet.orchestrator.client.checkpoints import CheckpointFolder as CheckpointFolder
    from stepfleet.orchestrator.client.checkpoints import load_checkpoint as load_checkpoint
    from stepfleet.orchestrator.client.checkpoints import save_checkpoint as save_checkpoint
    from stepfleet.orchestrator.client.comparison import RunComparison as RunComparison
    from stepfleet.orchestrator.client.costs import CostOptions as CostOptions
    from stepfleet.orchestrator.client.fleet import AsyncFleet as AsyncFleet
    from stepfleet.orchestrator.client.history import AsyncFleetHistory as AsyncFleetHistory
    from stepfleet.orchestrator.client.history import RestoreOptions as RestoreOptions
    from stepfleet.orchestrator.client.inputs import BatchOptions as BatchOptions
    from stepfleet.orchestrator.client.inputs import RunOptions as RunOptions
    from stepfleet.orchestrator.client.inputs import SubmitOptions as SubmitOptions
    from stepfleet.orchestrator.client.limits import AsyncFleetLimits as AsyncFleetLimits
    from stepfleet.orchestrator.client.local import DebugStep as DebugStep
    from stepfleet.orchestrator.client.rendering import RunView as RunView
    from stepfleet.orchestrator.client.rendering import UIMessage as UIMessage
    from stepfleet.orchestrator.client.runs import AsyncFleetRuns as AsyncFleetRuns
    from stepfleet.orchestrator.client.runs import RunConditions as RunConditions
    from stepfleet.orchestrator.client.schedules import (
        AsyncFleetSchedules as AsyncFleetSchedules,
    )
    from stepfleet.orchestrator.client.schedules import (
        ScheduleOptions as ScheduleOptions,
    )
    from stepfleet.orchestrator.continuation import ContinuationCriteria as ContinuationCriteria
    from stepfleet.orchestrator.continuation import when as when
    from stepfleet.orchestrator.continuation.error_policy import (
        ErrorHandlingDecision as ErrorHandlingDecision,
    )
    from stepfleet.orchestrator.continuation.error_policy import ErrorPolicy as ErrorPolicy
    from stepfleet.orchestrator.errors import AgentException as AgentException
    from stepfleet.orchestrator.errors import ConfigurationError as ConfigurationError
    from stepfleet.orchestrator.errors import ConflictError as ConflictError
    from stepfleet.orchestrator.errors import MaxStepsExceeded as MaxStepsExceeded
    from stepfleet.orchestrator.errors import NotFoundError as NotFoundError
    from stepfleet.orchestrator.errors import RunFailed as RunFailed
    from stepfleet.orchestrator.errors import StoreError as StoreError
    from stepfleet.orchestrator.events.envelope import StreamedText as StreamedText
    from stepfleet.orchestrator.events.subscribers import BroadcastConfig as BroadcastConfig
    from stepfleet.orchestrator.events.subscribers import Subscribers as Subscribers
    from stepfleet.orchestrator.limits.limit import Limit as Limit
    from stepfleet.orchestrator.memory.conversation import MemoryManager as MemoryManager
    from stepfleet.orchestrator.memory.policy import Memory as Memory
    from stepfleet.orchestrator.memory.policy import MemoryPolicy as MemoryPolicy
    from stepfleet.orchestrator.models.caching import CachePolicy as CachePolicy
    from stepfleet.orchestrator.models.caching import CacheStatistics as CacheStatistics
    from stepfleet.orchestrator.models.llm import LLM as LLM
    from stepfleet.orchestrator.models.pricing.ledger import CostStatistics as CostStatistics
    from stepfleet.orchestrator.models.pricing.ledger import ModelCall as ModelCall
    from stepfleet.orchestrator.models.support import Support as Support
    from stepfleet.orchestrator.models.support import supports as supports
    from stepfleet.orchestrator.protocol.serialization import (
        SlimSerializationConfig as SlimSerializationConfig,
    )
    from stepfleet.orchestrator.protocol.serialization import SlimSerializer as SlimSerializer
    from stepfleet.orchestrator.records.batch import BatchPage as BatchPage
    from stepfleet.orchestrator.records.batch import BatchProgress as BatchProgress
    from stepfleet.orchestrator.records.calls.answers import Ask as Ask
    from stepfleet.orchestrator.records.calls.answers import AskCount as AskCount
    from stepfleet.orchestrator.records.calls.answers import AskPage as AskPage
    from stepfleet.orchestrator.records.calls.answers import Decided as Decided
    from stepfleet.orchestrator.records.calls.answers import Decision as Decision
    from stepfleet.orchestrator.records.calls.answers import RunEnd as RunEnd
    from stepfleet.orchestrator.records.calls.answers import SubAgentLimits as SubAgentLimits
    from stepfleet.orchestrator.records.calls.tools import ToolCall as ToolCall
    from stepfleet.orchestrator.records.calls.tools import ToolCallRecord as ToolCallRecord
    from stepfleet.orchestrator.records.calls.tools import ToolSpec as ToolSpec
    from stepfleet.orchestrator.records.conversation.messages import Message as Message
    from stepfleet.orchestrator.records.conversation.messages import Role as Role
    from stepfleet.orchestrator.records.errors import Cause as Cause
    from stepfleet.orchestrator.records.errors import ErrorInfo as ErrorInfo
    from stepfleet.orchestrator.records.errors import ErrorType as ErrorType
    from stepfleet.orchestrator.records.errors import ModelErrorCode as ModelErrorCode
    from stepfleet.orchestrator.records.ledger import CallState as CallState
    from stepfleet.orchestrator.records.ledger import CostLine as CostLine
    from stepfleet.orchestrator.records.ledger import CostRow as CostRow
    from stepfleet.orchestrator.records.ledger import Costs as Costs
    from stepfleet.orchestrator.records.outcome import ContinuationDecision as ContinuationDecision
    from stepfleet.orchestrator.records.outcome import (
        ContinuationEvaluation as ContinuationEvaluation,
    )
    from stepfleet.orchestrator.records.outcome import ContinuationOutcome as ContinuationOutcome
    from stepfleet.orchestrator.records.outcome import StopReason as StopReason
    from stepfleet.orchestrator.records.responses import LLMResponse as LLMResponse
    from stepfleet.orchestrator.records.responses import ModelRequest as ModelRequest
    from stepfleet.orchestrator.records.responses import ModelSettings as ModelSettings
    from stepfleet.orchestrator.records.run.facts import FailedRun as FailedRun
    from stepfleet.orchestrator.records.run.facts import LastError as LastError
    from stepfleet.orchestrator.records.run.report import DebugSummary as DebugSummary
    from stepfleet.orchestrator.records.run.results import AgentRunResult as AgentRunResult
    from stepfleet.orchestrator.records.run.results import RunStatus as RunStatus
    from stepfleet.orchestrator.records.run.summary import RunPage as RunPage
    from stepfleet.orchestrator.records.run.summary import RunSummary as RunSummary
    from stepfleet.orchestrator.records.run.summary import RunTimeline as RunTimeline
    from stepfleet.orchestrator.records.run.summary import RunTree as RunTree
    from stepfleet.orchestrator.records.run.summary import StepSummary as StepSummary
    from stepfleet.orchestrator.records.run.trace import Action as Action
    from stepfleet.orchestrator.records.run.trace import AgentTrace as AgentTrace
    from stepfleet.orchestrator.records.run.trace import FinalAnswer as FinalAnswer
    from stepfleet.orchestrator.records.run.trace import Observation as Observation
    from stepfleet.orchestrator.records.run.trace import PlanningStep as PlanningStep
    from stepfleet.orchestrator.records.run.trace import Task as Task
    from stepfleet.orchestrator.records.run.trace import ToolTrace as ToolTrace
    from stepfleet.orchestrator.records.run.trace import ToolTraces as ToolTraces
    from stepfleet.orchestrator.records.schedule import Schedule as Schedule
    from stepfleet.orchestrator.records.schedule import ScheduleState as ScheduleState
    from stepfleet.orchestrator.records.schedule import ScheduleView as ScheduleView
    from stepfleet.orchestrator.records.state import AgentState as AgentState
    from stepfleet.orchestrator.records.state import Lifecycle as Lifecycle
    from stepfleet.orchestrator.records.steps import FinishReason as FinishReason
    from stepfleet.orchestrator.records.steps import Handoff as Handoff
    from stepfleet.orchestrator.records.steps import LoggedStep as LoggedStep
    from stepfleet.orchestrator.records.steps import StepResult as StepResult
    from stepfleet.orchestrator.records.usage import UsageStats as UsageStats
    from stepfleet.orchestrator.settings.settings import Settings as Settings
    from stepfleet.orchestrator.settings.signing import SigningKeys as SigningKeys
    from stepfleet.orchestrator.store.fleet.overview import FleetOverview as FleetOverview
    from stepfleet.orchestrator.store.limits import BudgetUse as BudgetUse
    from stepfleet.orchestrator.store.limits import LimitState as LimitState
    from stepfleet.orchestrator.store.limits import LimitUse as LimitUse
    from stepfleet.orchestrator.store.limits import LimitWait as LimitWait
    from stepfleet.orchestrator.store.limits import LimitWaits as LimitWaits
    from stepfleet.orchestrator.store.runs.control import ControlOutcome as ControlOutcome
    from stepfleet.orchestrator.store.runs.control import ControlResult as ControlResult
    from stepfleet.orchestrator.store.runs.reading import StoredRun as StoredRun
    from stepfleet.orchestrator.tools import CallStatus as CallStatus
    from stepfleet.orchestrator.tools import Done as Done
    from stepfleet.orchestrator.tools import Middleware as Middleware
    from stepfleet.orchestrator.tools import StateUpdate as StateUpdate
    from stepfleet.orchestrator.tools import ToolInvocation as ToolInvocation
    from stepfleet.orchestrator.tools import WithMedia as WithMedia
    from stepfleet.orchestrator.tools import current_invocation as current_invocation
    from stepfleet.orchestrator.tools import lazy_tool as lazy_tool
    from stepfleet.orchestrator.tools import mcp_server as mcp_server
    from stepfleet.orchestrator.tools import tool as tool
    from stepfleet.orchestrator.tools import tool_catalog as tool_catalog
    from stepfleet.orchestrator.tools.builtin import ask_person as ask_person
    from stepfleet.orchestrator.tools.builtin import calculator as calculator
    from stepfleet.orchestrator.tools.builtin import current_time as current_time
    from stepfleet.orchestrator.tools.builtin import http_get as http_get
    from stepfleet.orchestrator.tools.builtin import http_get_from as http_get_from

_WHERE = {
    "agents.agent": "Agent",
    "agents.answers": "Continue ReturnAnswer ReturnResult SpecialTool",
    "agents.builder": "AgentBuilder",
    "agents.config": "AgentConfig AgentKeywords RunOverrides",
    "agents.loader": "agents_of_file builder_of",
    "agents.planning": "Planning",
    "agents.strategies": "ChainOfThought NoOp ReAct StateChange Strategy StrategyContext",
    "agents.sub_agents": "AgentTool HandoffTool",
    "batches.check": "BatchCheck LineProblem",
    "batches.failures": "FailureGroup Failures",
    "batches.files.tables": "ResultTable",
    "client.approvals": "AsyncFleetApprovals DecideOptions",
    "client.batch": "AsyncBatch AsyncFleetBatches ThenOptions",
    "client.blocking": (
        "Batch Fleet FleetApprovals FleetBatches FleetCache FleetHistory FleetLimits FleetRuns "
        "FleetSchedules"
    ),
    "client.cache": "AsyncFleetCache",
    "client.checkpoints": "AgentCheckpoint CheckpointFolder load_checkpoint save_checkpoint",
    "client.comparison": "RunComparison",
    "client.costs": "CostOptions",
    "client.fleet": "AsyncFleet",
    "client.history": "AsyncFleetHistory RestoreOptions",
    "client.inputs": "BatchOptions RunOptions SubmitOptions",
    "client.limits": "AsyncFleetLimits",
    "client.local": "DebugStep",
    "client.operations.approvals": "AsyncFleetApprovals DecideOptions",
    "client.operations.cache": "AsyncFleetCache",
    "client.operations.costs": "CostOptions",
    "client.operations.limits": "AsyncFleetLimits",
    "client.operations.schedules": "AsyncFleetSchedules ScheduleOptions",
    "client.rendering": "RunView UIMessage",
    "client.runs": "AsyncFleetRuns RunConditions",
    "client.schedules": "AsyncFleetSchedules ScheduleOptions",
    "continuation": "ContinuationCriteria when",
    "continuation.error_policy": "ErrorHandlingDecision ErrorPolicy",
    "errors": (
        "AgentException ConfigurationError ConflictError MaxStepsExceeded NotFoundError "
        "RunFailed StoreError"
    ),
    "events.subscribers": "BroadcastConfig Subscribers",
    "events.envelope": "StreamedText",
    "limits.limit": "Limit",
    "memory.conversation": "MemoryManager",
    "memory.policy": "MemoryPolicy Memory",
    "models.caching": "CachePolicy CacheStatistics",
    "models.llm": "LLM",
    "models.pricing.ledger": "CostStatistics ModelCall",
    "models.support": "Support supports",
    "protocol.serialization": "SlimSerializer SlimSerializationConfig",
    "records.batch": "BatchPage BatchProgress",
    "records.calls.answers": "Ask AskCount AskPage Decided Decision RunEnd SubAgentLimits",
    "records.calls.tools": "ToolCall ToolCallRecord ToolSpec",
    "records.conversation.messages": "Message Role",
    "records.errors": "Cause ErrorInfo ErrorType ModelErrorCode",
    "records.ledger": "CallState CostLine CostRow Costs",
    "records.outcome": (
        "ContinuationDecision ContinuationEvaluation ContinuationOutcome StopReason"
    ),
    "records.responses": "LLMResponse ModelRequest ModelSettings",
    "records.run.facts": "FailedRun LastError",
    "records.run.report": "DebugSummary",
    "records.run.results": "AgentRunResult RunStatus",
    "records.run.summary": "RunPage RunSummary RunTimeline RunTree StepSummary",
    "records.run.trace": (
        "AgentTrace Action FinalAnswer Observation PlanningStep Task ToolTrace ToolTraces"
    ),
    "records.schedule": "Schedule ScheduleState ScheduleView",
    "records.state": "AgentState Lifecycle",
    "records.steps": "FinishReason Handoff LoggedStep StepResult",
    "records.usage": "UsageStats",
    "settings.settings": "Settings",
    "settings.signing": "SigningKeys",
    "store.fleet.overview": "FleetOverview",
    "store.limits": "BudgetUse LimitState LimitUse LimitWait LimitWaits",
    "store.runs.control": "ControlOutcome ControlResult",
    "store.runs.reading": "StoredRun",
    "tools": (
        "CallStatus Done Middleware StateUpdate ToolInvocation WithMedia current_invocation "
        "lazy_tool mcp_server tool tool_catalog"
    ),
    "tools.builtin": "ask_person calculator current_time http_get http_get_from",
}
_MODULES = {name: module for module, names in _WHERE.items() for name in names.split()}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
