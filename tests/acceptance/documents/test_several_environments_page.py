"""docs/how-to/several-environments-one-redis.md prints what it says, and leaves no other keys."""

from pathlib import Path

import redis
from support.documents.documents import ROOT, blocks_of, run_samples, samples_of

PAGE = (ROOT / "docs" / "how-to" / "several-environments-one-redis.md").read_text(encoding="utf-8")


def test_the_pages_fleets_see_only_their_own(redis_url: str, tmp_path: Path) -> None:
    samples = list(samples_of(blocks_of(PAGE)))
    printed = run_samples(samples, tmp_path, {"STEPFLEET_REDIS_URL": redis_url})
    assert printed == [one.prints for one in samples]
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        assert {key.partition(":")[0] for key in client.scan_iter("*")} == {"dev", "staging"}
