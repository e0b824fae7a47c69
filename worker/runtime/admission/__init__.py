"""Steps under the limits of the fleet: grants for their calls, and the care for the lines."""
