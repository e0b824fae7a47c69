"""An agent whose model is a class of its own: anything that can answer a request will do.

Nothing is asked over the network here, so this example needs neither a key nor a simulation. Put a
call of your own model's client into `generate`.
"""

from stepfleet import LLM, Agent, LLMResponse, ModelRequest, UsageStats


class WordCounter(LLM):
    """Answers with the number of words of the newest message."""

    async def generate(self, request: ModelRequest) -> LLMResponse:
        """Return the answer. What cannot be answered is raised as `ModelError`."""
        words = len(request.messages[-1].text.split())
        usage = UsageStats(prompt_tokens=words, completion_tokens=2, total_tokens=words + 2)
        return LLMResponse(content=f"{words} words", model="word-counter", usage=usage)


counter = Agent("counter", model=WordCounter())
