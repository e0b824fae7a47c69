"""Executes tool calls: one function for every call, and the threads that plain functions need."""

from stepfleet.orchestrator.records.conversation.messages import result_text
from stepfleet.worker.toolbox.box import LocalToolbox
from stepfleet.worker.toolbox.execution import execute_at_once, execute_call
from stepfleet.worker.toolbox.threads import ToolThreads

__all__ = ["LocalToolbox", "ToolThreads", "execute_at_once", "execute_call", "result_text"]
