"""Names that programs written for earlier agent frameworks know: snapshots, traces, checkpoints."""

from stepfleet.orchestrator.client.checkpoints import AgentCheckpoint as AgentCheckpoint
from stepfleet.orchestrator.client.checkpoints import CheckpointFolder as CheckpointFolder
from stepfleet.orchestrator.client.checkpoints import load_checkpoint as load_checkpoint
from stepfleet.orchestrator.client.checkpoints import save_checkpoint as save_checkpoint
from stepfleet.orchestrator.memory.conversation import MemoryManager as MemoryManager
from stepfleet.orchestrator.protocol.serialization import (
    SlimSerializationConfig as SlimSerializationConfig,
)
from stepfleet.orchestrator.protocol.serialization import SlimSerializer as SlimSerializer
from stepfleet.orchestrator.records.run.trace import Action as Action
from stepfleet.orchestrator.records.run.trace import AgentTrace as AgentTrace
from stepfleet.orchestrator.records.run.trace import FinalAnswer as FinalAnswer
from stepfleet.orchestrator.records.run.trace import Observation as Observation
from stepfleet.orchestrator.records.run.trace import PlanningStep as PlanningStep
from stepfleet.orchestrator.records.run.trace import Task as Task
from stepfleet.orchestrator.records.run.trace import ToolTrace as ToolTrace
from stepfleet.orchestrator.records.run.trace import ToolTraces as ToolTraces
