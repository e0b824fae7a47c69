"""Types of what the methods of a fleet take and return, for annotations."""

from stepfleet.orchestrator.agents.config import AgentKeywords as AgentKeywords
from stepfleet.orchestrator.agents.config import RunOverrides as RunOverrides
from stepfleet.orchestrator.agents.sub_agents import AgentTool as AgentTool
from stepfleet.orchestrator.agents.sub_agents import HandoffTool as HandoffTool
from stepfleet.orchestrator.batches.check import BatchCheck as BatchCheck
from stepfleet.orchestrator.batches.check import LineProblem as LineProblem
from stepfleet.orchestrator.batches.failures import FailureGroup as FailureGroup
from stepfleet.orchestrator.batches.failures import Failures as Failures
from stepfleet.orchestrator.batches.files.tables import ResultTable as ResultTable
from stepfleet.orchestrator.client.batch import AsyncFleetBatches as AsyncFleetBatches
from stepfleet.orchestrator.client.blocking.fleet import FleetApprovals as FleetApprovals
from stepfleet.orchestrator.client.blocking.fleet import FleetBatches as FleetBatches
from stepfleet.orchestrator.client.blocking.fleet import FleetCache as FleetCache
from stepfleet.orchestrator.client.blocking.fleet import FleetHistory as FleetHistory
from stepfleet.orchestrator.client.blocking.fleet import FleetLimits as FleetLimits
from stepfleet.orchestrator.client.blocking.fleet import FleetRuns as FleetRuns
from stepfleet.orchestrator.client.blocking.fleet import FleetSchedules as FleetSchedules
from stepfleet.orchestrator.client.history.comparison import RunComparison as RunComparison
from stepfleet.orchestrator.client.history.history import AsyncFleetHistory as AsyncFleetHistory
from stepfleet.orchestrator.client.local import DebugStep as DebugStep
from stepfleet.orchestrator.client.operations.approvals import (
    AsyncFleetApprovals as AsyncFleetApprovals,
)
from stepfleet.orchestrator.client.operations.cache import AsyncFleetCache as AsyncFleetCache
from stepfleet.orchestrator.client.operations.limits import AsyncFleetLimits as AsyncFleetLimits
from stepfleet.orchestrator.client.operations.schedules import (
    AsyncFleetSchedules as AsyncFleetSchedules,
)
from stepfleet.orchestrator.client.rendering import RunView as RunView
from stepfleet.orchestrator.client.rendering import UIMessage as UIMessage
from stepfleet.orchestrator.client.runs import AsyncFleetRuns as AsyncFleetRuns
from stepfleet.orchestrator.client.watching.conditions import RunConditions as RunConditions
from stepfleet.orchestrator.models.caching import CacheStatistics as CacheStatistics
from stepfleet.orchestrator.models.pricing.ledger import CostStatistics as CostStatistics
from stepfleet.orchestrator.models.pricing.ledger import ModelCall as ModelCall
from stepfleet.orchestrator.models.support import Support as Support
from stepfleet.orchestrator.records.batch import BatchPage as BatchPage
from stepfleet.orchestrator.records.calls.answers import Ask as Ask
from stepfleet.orchestrator.records.calls.answers import AskCount as AskCount
from stepfleet.orchestrator.records.calls.answers import AskPage as AskPage
from stepfleet.orchestrator.records.calls.answers import Decided as Decided
from stepfleet.orchestrator.records.calls.answers import Decision as Decision
from stepfleet.orchestrator.records.calls.answers import RunEnd as RunEnd
from stepfleet.orchestrator.records.conversation.messages import Role as Role
from stepfleet.orchestrator.records.errors import Cause as Cause
from stepfleet.orchestrator.records.ledger import CallState as CallState
from stepfleet.orchestrator.records.ledger import CostLine as CostLine
from stepfleet.orchestrator.records.ledger import CostRow as CostRow
from stepfleet.orchestrator.records.run.facts import FailedRun as FailedRun
from stepfleet.orchestrator.records.run.facts import LastError as LastError
from stepfleet.orchestrator.records.run.report import DebugSummary as DebugSummary
from stepfleet.orchestrator.records.run.summary import RunPage as RunPage
from stepfleet.orchestrator.records.run.summary import RunSummary as RunSummary
from stepfleet.orchestrator.records.run.summary import RunTimeline as RunTimeline
from stepfleet.orchestrator.records.run.summary import RunTree as RunTree
from stepfleet.orchestrator.records.run.summary import StepSummary as StepSummary
from stepfleet.orchestrator.records.schedule import Schedule as Schedule
from stepfleet.orchestrator.records.schedule import ScheduleState as ScheduleState
from stepfleet.orchestrator.records.schedule import ScheduleView as ScheduleView
from stepfleet.orchestrator.records.steps import Handoff as Handoff
from stepfleet.orchestrator.records.steps import LoggedStep as LoggedStep
from stepfleet.orchestrator.store.admission.limit_use import BudgetUse as BudgetUse
from stepfleet.orchestrator.store.admission.limit_use import LimitUse as LimitUse
from stepfleet.orchestrator.store.admission.lines import LimitState as LimitState
from stepfleet.orchestrator.store.admission.lines import LimitWait as LimitWait
from stepfleet.orchestrator.store.admission.lines import LimitWaits as LimitWaits
from stepfleet.orchestrator.store.fleet.overview import FleetOverview as FleetOverview
from stepfleet.orchestrator.store.runs.reading import StoredRun as StoredRun
