"""What of a conversation is sent to the model. Pure over messages."""
