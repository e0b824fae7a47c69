"""OpenAI's chat completions, and services compatible with them."""
