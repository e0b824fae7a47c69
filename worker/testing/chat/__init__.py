"""Chat completions: requests as they come, replies and faults as they go out. Pure."""
