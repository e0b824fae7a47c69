"""`python -m stepfleet.orchestrator.cli` is `stepfleet`."""

from stepfleet.orchestrator.cli.entry import main

main()
