"""The interface of a model, services and their failures, prices, the response cache as values."""
