"""The interface of a model; what its answers cost, and which are shared."""
