"""Whether an ended run may go on, and the limit that must be raised for it."""

import pytest
from support.runs.agent_records import a_state

from stepfleet.orchestrator import AgentConfig, ConfigurationError, UsageStats
from stepfleet.orchestrator.client.control import changes_of, ensure_resumable


@pytest.mark.parametrize(
    ("limit", "used", "named"),
    [(4, 5, "token_limit=10"), (1_000_000, 1_234_567, "token_limit=2469134")],
)
def test_the_limit_is_named_in_full(limit: int, used: int, named: str) -> None:
    config = AgentConfig(name="clerk", model="openai:tiny", token_limit=limit)
    state = a_state(1, usage=UsageStats(total_tokens=used))
    with pytest.raises(ConfigurationError, match=rf"raise it: retry with {named}$"):
        ensure_resumable("r", changes_of(config, {}, {}).criteria, state, "retry")
