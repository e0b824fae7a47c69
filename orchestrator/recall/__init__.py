"""Memories that outlive a conversation, for an agent's `context`: notes, words, vectors."""

from stepfleet.orchestrator.recall.keywords import KeywordMemory as KeywordMemory
from stepfleet.orchestrator.recall.notes import InMemoryNotes as InMemoryNotes
from stepfleet.orchestrator.recall.notes import Notes as Notes
from stepfleet.orchestrator.recall.redis_notes import RedisNotes as RedisNotes
from stepfleet.orchestrator.recall.vectors import VectorMemory as VectorMemory

__all__ = ["InMemoryNotes", "KeywordMemory", "Notes", "RedisNotes", "VectorMemory"]
