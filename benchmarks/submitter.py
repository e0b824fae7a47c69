"""Submits a file through `Fleet.submit_batch`, in a process of its own: started by submit.py.

python benchmarks/submitter.py FILE            # STEPFLEET_REDIS_URL names the store

Prints {"seconds": ..., "cpu": ..., "runs": ...}; its memory is read from outside.
"""

import json
import os
import sys
import time

from agents import runner

from stepfleet import Fleet


def main() -> None:
    """Submit and print."""
    with Fleet(os.environ["STEPFLEET_REDIS_URL"]) as fleet:
        started, cpu = time.monotonic(), time.process_time()
        batch = fleet.submit_batch(sys.argv[1], agent=runner)
        seconds, used = time.monotonic() - started, time.process_time() - cpu
        print(json.dumps({"seconds": seconds, "cpu": used, "runs": batch.progress().total}))


if __name__ == "__main__":
    main()
