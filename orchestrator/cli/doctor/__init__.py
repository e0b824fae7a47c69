"""`stepfleet doctor`: facts of a set-up, judged, with the fix for each finding."""
