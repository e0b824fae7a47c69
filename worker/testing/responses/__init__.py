"""OpenAI's Responses: requests as they arrive, answers as they are sent. Pure."""
