"""A model call behind the circuit of its service: not made while it is open, noted if it fails."""

from stepfleet.orchestrator.errors import ModelError, ModelTimeoutError
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.verdict import circuit_id
from stepfleet.orchestrator.records.errors import PERMANENT, ModelErrorCode
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.worker.ports import AgentCode, Call, Circuits, Ports

_OF_A_SERVICE = {
    ModelErrorCode.CONNECTION_ERROR,
    ModelErrorCode.SERVER_ERROR,
    ModelErrorCode.TIMEOUT,
}


_FROM_A_SERVICE = {*PERMANENT, ModelErrorCode.RATE_LIMIT, ModelErrorCode.EMPTY_ANSWER} - {
    ModelErrorCode.SETUP
}
"""Only a service that is there answers like this."""


def counts(error: ModelError) -> bool:
    """Return whether the service has failed: no limit of it, nor the caller's own deadline."""
    own = isinstance(error, ModelTimeoutError)
    return error.retryable and error.code in _OF_A_SERVICE and not own


def behind_circuit(claim: Claim, agent: AgentCode, ports: Ports, ask: Call) -> Call:
    """Return `ask` behind the circuits of the services that it calls."""
    circuits = ports.circuits
    if circuits is None:
        return ask

    async def guarded(request: ModelRequest) -> LLMResponse:
        service = agent.service(request) if circuits.watched else ""
        if service:
            _check(claim, service, circuits)
        try:
            response = await ask(request)
        except ModelError as error:
            if counts(error):
                of = await circuits.failed(agent.service(request), claim.run_id, error)
                error.outage = (of,) if of else ()
            elif circuits.watched and error.code in _FROM_A_SERVICE and not error.unsent:
                await circuits.answered(agent.service(request))
            raise
        if circuits.watched and not (response.cache and response.cache.hit):
            await circuits.answered(service or agent.service(request))
        return response

    return guarded


def _check(claim: Claim, service: str, circuits: Circuits) -> None:
    """Raise `ModelError` where the service is out, unless this step is to probe it."""
    of = circuit_id(service)
    if claim.outage and claim.outage.probes and of in claim.outage.circuits:
        return
    if reason := circuits.refusal(service):
        error = ModelError(
            f"{service} is out, no call was made: {reason}",
            retryable=True,
            code=ModelErrorCode.CIRCUIT_OPEN,
        )
        error.outage = (of,)
        raise error
