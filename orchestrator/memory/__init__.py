"""The part of a conversation that is sent to the model. Pure over messages."""
