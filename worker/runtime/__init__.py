"""What a worker runs besides steps: services, rescue, isolation, housekeeping, shutdown."""
