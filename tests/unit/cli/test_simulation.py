import pytest

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.cli.workers import Simulated


def test_rules_alone_leave_latency_and_faults_to_the_server() -> None:
    found = Simulated("rules.py:rules")

    assert found.wanted() is found
    assert found.arguments == ["--rules", "rules.py:rules"]


def test_latency_and_faults_are_passed_on() -> None:
    found = Simulated("rules.py:rules", "0.2-1.5", 0.05)

    assert found.arguments[2:] == ["--latency=0.2-1.5", "--faults=0.05"]


def test_without_simulation_there_is_nothing() -> None:
    assert Simulated().wanted() is None


@pytest.mark.parametrize(
    ("latency", "faults", "option"),
    [("1", None, "--simulate-latency"), (None, 0.0, "--simulate-faults")],
)
def test_latency_or_faults_without_rules_are_refused(
    latency: str | None, faults: float | None, option: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"{option} needs --simulate RULES"):
        Simulated(None, latency, faults).wanted()
