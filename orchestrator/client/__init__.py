"""`Fleet` and `AsyncFleet`: what users call."""
