"""The JSON API in Flower, below `/api/stepfleet/`: runs, batches, the fleet, costs, and actions."""
