"""What the prompts of agents take beside what is counted of their messages."""

from stepfleet.orchestrator.limits.estimates import AgentEstimates
from stepfleet.orchestrator.protocol.claim import Work

MOST_EXPECTED = 10_000


class Prompts:
    """Learns how much larger prompts are than expected: by schemas of tools, and a service's own.

    Whole prompts, and those of which all but the newest messages were measured, are learned apart.
    """

    def __init__(self) -> None:
        self._beside = {whole: AgentEstimates(0) for whole in (True, False)}
        self._expected: dict[str, tuple[int, int, bool]] = {}

    def expect(self, agent: str, hint: Work, counted: int, *, whole: bool) -> int:
        """Return the tokens of a step's prompt, of which so many were counted."""
        if len(self._expected) >= MOST_EXPECTED:
            self._expected.clear()
        if (
            self._expected.get(hint.run_id, (-1,))[0] != hint.step
        ):  # a claim counts a step once more
            self._expected[hint.run_id] = hint.step, counted, whole
        return counted + self._beside[whole].of(agent)

    def learn(self, agent: str, hint: Work, tokens: int) -> None:
        """Note how many tokens the prompt of a step had."""
        step, counted, whole = self._expected.pop(hint.run_id, (-1, 0, True))
        if step == hint.step:
            self._beside[whole].learn(agent, max(tokens - counted, 0))
