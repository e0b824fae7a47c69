"""Map-reduce: a run per review, then a run per page of results, until one run is left.

The three batches follow each other on the workers: this client may end meanwhile.
"""

import os

from agents import editor, reader
from rules import rules

from stepfleet import Fleet
from stepfleet.worker.testing.server import ModelServer

WORDS = ("a lovely lamp", "broke at once", "works as told", "too dark", "bright enough")
REVIEWS = [{"id": f"r{n}", "input": f"Lamp {n}: {WORDS[n % len(WORDS)]}"} for n in range(1, 121)]


def main() -> None:
    """Count the judgements of all reviews with a model: simulated, unless a key is set."""
    with ModelServer(rules) as server:
        if "OPENAI_API_KEY" not in os.environ:
            os.environ.update(OPENAI_API_KEY="none", OPENAI_BASE_URL=server.url)
        with Fleet.local(agents=[reader, editor]) as fleet:
            reviews = fleet.submit_batch(REVIEWS, agent=reader)
            total = reviews.then(editor, "Results: {outputs}", page=10, until_one=True)
            for result in total.results():
                print(result.output)


if __name__ == "__main__":
    main()
