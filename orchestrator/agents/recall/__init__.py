"""Memories that outlive a conversation, for an agent's `context`: notes, words, vectors."""

from stepfleet.orchestrator.agents.recall.keywords import KeywordMemory as KeywordMemory
from stepfleet.orchestrator.agents.recall.notes import InMemoryNotes as InMemoryNotes
from stepfleet.orchestrator.agents.recall.notes import Notes as Notes
from stepfleet.orchestrator.agents.recall.notes import RedisNotes as RedisNotes
from stepfleet.orchestrator.agents.recall.vectors import VectorMemory as VectorMemory

__all__ = ["InMemoryNotes", "KeywordMemory", "Notes", "RedisNotes", "VectorMemory"]
