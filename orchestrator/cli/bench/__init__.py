"""`stepfleet bench`: what a fleet costs on this machine, measured with a simulated provider."""
