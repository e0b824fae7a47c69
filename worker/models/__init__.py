"""Model calls: one provider per module, foreign failures translated at the edge.

Knows nothing of runs, steps or Redis: a request goes in, an answer or a `ModelError` comes out.
"""

from stepfleet.worker.models.providers import Models, Watch, generate_sync

__all__ = ["Models", "Watch", "generate_sync"]
