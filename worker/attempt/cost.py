"""What a model call costs: by the agent's own prices where it states some, else by the worker's."""

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.models.pricing.agent_prices import stated_cost
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.usage import bounded_cost
from stepfleet.worker.ports import Ports


def call_cost(response: LLMResponse, asked: str, config: AgentConfig, ports: Ports) -> float:
    """Return the cost of a response in USD, 0 where its usage is unknown; `asked` is the model.

    Prices are others' input: what they come to is bounded.
    """
    usage = response.usage
    if usage is None:
        return 0.0
    model = response.model or asked
    if config.pricing:
        cost = stated_cost(config.pricing, (model, asked), usage)
        if cost is not None:
            return bounded_cost(cost)
    return bounded_cost(ports.cost(model, usage))
