"""Google's Gemini: requests as they arrive, answers as they are sent. Pure."""
