"""The command line `stepfleet`, a thin layer over `client`.

Imports nothing heavy: `stepfleet --help` answers at once.
"""

from stepfleet.orchestrator.cli.main import main

__all__ = ["main"]
