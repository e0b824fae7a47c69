"""Lets the leases of workers that have died run out, at once and however long they are.

So a worker that is to be killed may have a long lease, and keeps its work until then, however
seldom the machine runs it.
"""

import redis

_PARTS_OF_A_HEADER = 3  # sf:{s00}:run:<id>; what else a run has goes behind its id


def leases_run_out(redis_url: str) -> None:
    """Move the leases of all steps and tool calls that are held into the past."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        for key in client.scan_iter("sf:{*}:run:*"):
            if key.count(":") == _PARTS_OF_A_HEADER:
                if client.hget(key, "token"):
                    client.hset(key, "lease", 1)
                tag, _, run_id = key.partition("run:")
                client.zadd(f"{tag}due", {run_id: 1}, xx=True)
            elif key.endswith(":journal"):
                for field in client.hkeys(key):
                    if field.startswith(("l:", "n:")):
                        client.hset(key, field, 1)
