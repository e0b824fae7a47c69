"""`python -m stepfleet.worker.testing`."""

from stepfleet.worker.testing.command import main

if __name__ == "__main__":
    raise SystemExit(main())
