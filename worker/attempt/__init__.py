"""What a step does between claim and commit: the model call and the tools."""
