"""Run large fleets of LLM agents on Celery, one durable step per task.

What programs write is here: `from stepfleet import Agent, Fleet, tool`. `__init__.pyi` lists the
names; each is imported at its first use, and importing `stepfleet` imports nothing by itself.

- `stepfleet.types`: what methods of a fleet take and return, for annotations
- `stepfleet.compat`: names of earlier agent frameworks
- `stepfleet.orchestrator`, `stepfleet.worker`: the two halves
"""

from stepfleet._lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, "__init__.pyi")
