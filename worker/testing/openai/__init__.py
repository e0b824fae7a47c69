"""OpenAI's chat completions: requests as they arrive, answers as they are sent. Pure."""
