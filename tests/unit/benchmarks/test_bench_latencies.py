import statistics
from random import Random

import pytest
from support.benchmarks import benchmark

from stepfleet.orchestrator import ConfigurationError

Latencies = benchmark("bench_load").Latencies


def drawn(text: str, count: int = 4000) -> list[float]:
    random = Random(7)
    latency = Latencies.parse(text)
    return sorted(latency.draw(random) for _ in range(count))


def test_a_number_is_what_every_call_takes() -> None:
    assert set(drawn("0.5", 10)) == {0.5}


def test_two_numbers_are_the_bounds_of_an_even_spread() -> None:
    values = drawn("0.2-1.2")

    assert values[0] >= 0.2
    assert values[-1] <= 1.2
    assert statistics.mean(values) == pytest.approx(0.7, abs=0.03)


def test_a_log_normal_spread_has_the_percentiles_that_were_asked_for() -> None:
    values = drawn("p50=1,p99=8", 20_000)

    assert values[10_000] == pytest.approx(1.0, rel=0.05)
    assert values[19_800] == pytest.approx(8.0, rel=0.15)


def test_a_tail_takes_its_share_of_calls() -> None:
    values = drawn("0.1,tail=0.1:30")

    assert set(values) == {0.1, 30.0}
    assert values.count(30.0) / len(values) == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(
    "text",
    [
        *("", "soon", "-1", "2-1", "1-2-3", "nan", "inf"),
        *("p50=1", "p99=8", "p50=8,p99=1", "p50=0,p99=1", "p95=3"),
        *("1,tail=2:3", "1,tail=0.1", "tail=0.1:30"),
    ],
)
def test_what_is_no_latency_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--latency.*write 0\.5 \(always\)"):
        Latencies.parse(text)
