"""An agent whose model is a class of ten lines."""

from stepfleet.orchestrator import LLM, Agent, LLMResponse, ModelRequest


class Echo(LLM):
    """Says what it was told last."""

    async def generate(self, request: ModelRequest) -> LLMResponse:
        return LLMResponse(content=f"echo of {request.messages[-1].text}", model="echo")


echo = Agent("echo", model=Echo())
