"""Records, stores and single runs for tests."""
