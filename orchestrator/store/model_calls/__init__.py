"""What all model calls share: the ledger, circuits of services, cached responses."""
