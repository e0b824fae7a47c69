"""Anthropic's Messages: requests as they arrive, answers as they are sent."""
