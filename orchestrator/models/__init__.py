"""The interface of a model, the prices of its calls, and the response cache as values."""
