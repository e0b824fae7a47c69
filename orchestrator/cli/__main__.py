"""`python -m stepfleet.orchestrator.cli` is `stepfleet`."""

from stepfleet.orchestrator.cli.main import main

if __name__ == "__main__":
    main()
