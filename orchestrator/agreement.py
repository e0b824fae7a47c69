"""What a run's configuration agrees on as its answer: the contract made of it, and its checks.

Knows no worker and no step.
"""

from collections.abc import Sequence

from stepfleet.orchestrator.answers.contract import AnswerContract
from stepfleet.orchestrator.answers.special import SpecialTool
from stepfleet.orchestrator.config import AgentConfig
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.schemas.handles import handle_of


def contract_of(config: AgentConfig, specials: Sequence[SpecialTool]) -> AnswerContract | None:
    """Return the answer contract of runs of `config`, or None where any text ends them.

    Raises `ConfigurationError` where `specials` lack one that the run was started with.
    """
    if not config.demands_answer and not config.special_tools:
        return None
    known = {one.name: one for one in specials}
    missing = [name for name in config.special_tools if name not in known]
    if missing:
        msg = (
            f"agent {config.name!r} on this worker has no special tool {missing[0]!r}, which the "
            "run was started with; deploy it again under that name"
        )
        raise ConfigurationError(msg)
    return AnswerContract(
        handle_of(config.output_schema) if config.output_schema is not None else None,
        required=config.demands_answer,
        native=config.answer_mode == "native",
        specials=(known[name] for name in config.special_tools),
    )


def check_agreement(config: AgentConfig, specials: Sequence[SpecialTool]) -> None:
    """Raise `ConfigurationError` where an agent's answer contract cannot be kept."""
    wrong = [one for one in specials if not isinstance(one, SpecialTool)]
    if wrong:
        kind = type(wrong[0]).__name__
        msg = f"agent {config.name!r}: special_tools holds a {kind}; give SpecialTool objects"
        raise ConfigurationError(msg)
    config.check_answer()
