"""A scripted model, in process or over real HTTP, for the tests of those who write agents.

`Scripted` runs an agent against a list of replies: the pytest fixture `scripted`. `ModelServer`
speaks the protocols of the built-in providers, checks every conversation that it receives, and
fails on purpose where faults are planned; `python -m stepfleet.worker.testing` runs it as a
program. The public names are imported at their first use: pytest loads the fixtures of an installed
package at its every start.
"""

from stepfleet._lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, "worker/testing/__init__.pyi")
