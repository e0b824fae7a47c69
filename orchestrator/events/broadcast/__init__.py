"""Ways of events out of the fleet: pub/sub channels, webhooks, functions. Knows no step."""
