"""What waits without a slot: calls for other runs and for people, runs for the ends of others."""
