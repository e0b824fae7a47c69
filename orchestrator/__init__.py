"""Decides what happens. Imports no worker. Programs import the public names from `stepfleet`.

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

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepfleet import *  # noqa: F403
    from stepfleet.compat import *  # noqa: F403
    from stepfleet.types import *  # noqa: F403
else:  # programs wrote `from stepfleet.orchestrator import Agent` before `stepfleet` had the names
    from stepfleet._lazy import lazy_names

    __getattr__, __dir__ = lazy_names(__name__, "__init__.pyi", "compat.py", "types.py")
