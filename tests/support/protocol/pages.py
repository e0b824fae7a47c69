"""Scripts that read a log by the step and a journal by the field: every claim takes pages."""

PAGED = ("claim", "page")
"""The scripts that read a run's log."""
BOUNDS = "MOST_STEPS, MOST_BYTES, MOST_FIELDS = 200, 262144, 1000"
LEAST = "MOST_STEPS, MOST_BYTES, MOST_FIELDS = 1, 1, 1"
RENEWAL = (
    "redis.call('HSET', run_key, 'lease', till, 'elapsed', digits(now - number(h.leased_at)))\n"
    "redis.call('ZADD', due_key, till, run_id)\n"
)


def paged(texts: dict[str, str]) -> dict[str, str]:
    """Return these scripts with the least bounds.

    The model knows no page, so no page renews a lease: that has a test in `test_long_logs.py`.
    """
    assert all(text.count(BOUNDS) == 1 for text in texts.values())
    assert texts["page"].count(RENEWAL) == 1
    small = {name: text.replace(BOUNDS, LEAST) for name, text in texts.items()}
    return small | {"page": small["page"].replace(RENEWAL, "")}
