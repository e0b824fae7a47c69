"""OpenAI's Responses, without the service's own store.

Follows the types of the official SDK, `openai` 3.54.
"""
