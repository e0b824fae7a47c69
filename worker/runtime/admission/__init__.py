"""Steps under the limits of the fleet: leave for their calls, and who looks after the lines."""
