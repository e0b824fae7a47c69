"""The command line `stepfleet`. Thin: what it does is in `fleet`, how it looks is here.

Imports nothing heavy: `stepfleet --help` answers at once.
"""

from stepfleet.orchestrator.cli.main import main

__all__ = ["main"]
