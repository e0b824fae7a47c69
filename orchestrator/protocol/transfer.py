"""Hand-offs: which call of a response has another agent go on with the run, and as what. Pure.

The first one counts. The run keeps its limits, its error policy and what it publishes; its other
overrides were meant for the agent before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.agents.overrides import limits_of, merged_overrides, read_overrides
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.records.calls.tools import (
    NOT_EXECUTED,
    ToolCall,
    ToolCallRecord,
    refused,
)
from stepfleet.orchestrator.records.steps import HandedOver, LoggedStep, RunAgent

LONGEST_REASON = 1000


@dataclass(frozen=True, slots=True)
class Transfer:
    """The call at `index` hands over to the agent `to`; `others` are the calls that come too late.

    `target` is that agent's stored configuration, once it is known.
    """

    index: int
    to: str
    others: tuple[int, ...] = ()
    target: AgentConfig | None = None


def transfer_in(calls: Sequence[ToolCall], targets: Mapping[str, str]) -> Transfer | None:
    """Return the transfer of a response; `targets` are the agents by the names of the tools."""
    found = [at for at, call in enumerate(calls) if call.name in targets and call.error is None]
    if not found:
        return None
    first, *others = found
    return Transfer(first, targets[calls[first].name], tuple(others))


def too_late(call: ToolCall, to: str, at: datetime) -> ToolCallRecord:
    """Return the record of a transfer behind the first one of its response: no failure."""
    message = f"not done: an earlier call of this response hands over to agent {to}"
    return refused(call, at, code=NOT_EXECUTED, message=message)


def handed_over(
    claim: Claim, transfer: Transfer | None, record: ToolCallRecord | None
) -> HandedOver | None:
    """Return the hand-off that a turn makes; None where the call has failed, or not been made."""
    if transfer is None or transfer.target is None or record is None or record.is_error:
        return None
    config, target = claim.config, transfer.target
    reason = record.arguments.get("reason")
    return HandedOver(
        by=RunAgent(
            name=config.name,
            config=claim.config_digest,
            overrides=read_overrides(claim.overrides),
        ),
        to=RunAgent(
            name=target.name,
            config=target.digest,
            overrides=limits_of(config, unlike=target),
        ),
        reason=reason[:LONGEST_REASON] if isinstance(reason, str) else "",
        trims=config.memory.trim_log,
    )


def agent_before(log: Sequence[LoggedStep], step: int) -> RunAgent | None:
    """Return whose step `step` (from 0) is; None where no other agent has the run since."""
    later = (one.handoff for one in log if one.handoff and one.result.step > step)
    return next((one.by for one in later), None)


def overrides_of(agent: RunAgent, config: AgentConfig) -> dict[str, object]:
    """Return the overrides of a run that goes back to an agent, with the limits that it has now."""
    return merged_overrides(agent.overrides, limits_of(config))
