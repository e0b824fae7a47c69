"""Headers about the limits of an account: what is read of them, and what is left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfleet.orchestrator.models.rate_headers import (
    Standing,
    standings,
    stated_in_refusal,
)

DATE = "Mon, 23 Nov 2026 12:00:00 GMT"
OPENAI = {
    "x-ratelimit-limit-requests": "3000",
    "x-ratelimit-remaining-requests": "2999",
    "x-ratelimit-reset-requests": "20ms",
    "x-ratelimit-limit-tokens": "200000",
    "x-ratelimit-remaining-tokens": "0",
    "x-ratelimit-reset-tokens": "1m0.5s",
}
ANTHROPIC = {
    f"anthropic-ratelimit-{kind}-{field}": value
    for kind in ("requests", "tokens", "input-tokens", "output-tokens")
    for field, value in (("limit", "50"), ("remaining", "49"), ("reset", "2026-11-23T12:00:02Z"))
} | {"date": DATE}


def test_limits_of_both_protocols_are_read() -> None:
    assert standings(OPENAI) == {
        "r": Standing(3000, 2999, 0.02),
        "t": Standing(200_000, 0, 60.5),
    }
    assert standings(ANTHROPIC) == dict.fromkeys("rtio", Standing(50, 49, 2.0))
    assert standings({"retry-after": "3"}) == {}


def test_moments_are_relative_to_the_answers_own_date() -> None:
    sent = {**ANTHROPIC, "date": "Mon, 23 Nov 2026 12:00:01 GMT"}
    assert standings(sent)["r"].reset == 1.0
    assert standings({**sent, "date": "yesterday"})["r"].reset is None


def test_limits_of_a_day_are_no_limits_of_a_minute() -> None:
    daily = {**OPENAI, "x-ratelimit-reset-requests": "7m12s"}
    assert set(standings(daily)) == {"t"}


WRONG = ("", "nan", "inf", "-5", "0", "0.5", "1e-300", "1e300", "many", "9" * 500, "\x00")


@pytest.mark.parametrize("value", WRONG)
def test_what_is_no_number_states_nothing(value: str) -> None:
    hostile = {**OPENAI, "x-ratelimit-limit-requests": value}
    assert set(standings(hostile)) == {"t"}


@pytest.mark.parametrize(
    ("moment", "seconds"), [("1767268804", 4), ("1767268804500", 4.5), ("1767355200", None)]
)
def test_a_moment_is_read_as_one(moment: str, seconds: float | None) -> None:
    date = {"date": "Thu, 01 Jan 2026 12:00:00 GMT"}
    found = standings({**OPENAI, **date, "x-ratelimit-reset-requests": moment})
    assert (found["r"].reset if "r" in found else None) == seconds


NAMES = st.sampled_from([*OPENAI, *ANTHROPIC, "date"])
VALUES = st.text() | st.sampled_from([*OPENAI.values(), *ANTHROPIC.values(), *WRONG])


@given(st.dictionaries(NAMES, VALUES, max_size=20))
def test_no_headers_break_the_reading(headers: dict[str, str]) -> None:
    found = standings(headers)
    assert set(found) <= set("rtio")
    for one in found.values():
        assert one.limit > 0
        assert not one.is_scarce or None not in (one.remaining, one.reset)


def test_little_is_left_below_a_quarter_of_the_bucket() -> None:
    assert not Standing(3000, 50, 1.0).is_scarce  # half of a bucket of 100
    assert Standing(3000, 20, 1.6).is_scarce
    assert not Standing(3000).is_scarce


@pytest.mark.parametrize(
    ("error", "stated"),
    [
        (
            "Rate limit reached for gpt-4o on requests per min (RPM): Limit 500, Used 500.",
            {"r": 500},
        ),
        (
            "Rate limit reached on tokens per minute (TPM): Limit 6,000, Used 5800",
            {"t": 6000},
        ),
        ("Rate limit reached on requests per day (RPD): Limit 200, Used 200, Requested 1.", {}),
        (
            "This request would exceed your rate limit of 50,000 input tokens per minute. For",
            {"i": 50_000},
        ),
        ("Limit: none", {}),
        ("on requests per min: limit 0", {}),
    ],
)
def test_a_refusal_states_its_limits_per_minute(error: str, stated: dict[str, float]) -> None:
    assert stated_in_refusal(error, {"message": error}) == stated


def test_googles_quotas_are_in_the_details_of_a_refusal() -> None:
    quotas = [
        {"quotaId": "GenerateRequestsPerMinutePerProjectPerModel-FreeTier", "quotaValue": "15"},
        {"quotaId": "GenerateContentInputTokensPerMinutePerProject", "quotaValue": "250000"},
        {"quotaId": "GenerateRequestsPerDayPerProjectPerModel", "quotaValue": "200"},
        {"quotaId": 7},
        "odd",
    ]
    details = [{"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": quotas}, 1]
    assert stated_in_refusal("quota", {"details": details}) == {"r": 15, "i": 250_000}
    assert stated_in_refusal("quota", {"details": {"violations": quotas}}) == {}
