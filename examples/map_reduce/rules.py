"""A simulated model: a word per review, and sums of what the results in a prompt count."""

import re

from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply

GOOD = ("lovely", "works", "bright")


def rules(request: RequestRecord) -> Reply:
    """Judge a review by its words; count the judgements in a list of results."""
    text = request.question
    if not text.startswith("Results:"):
        return Reply("positive" if any(word in text for word in GOOD) else "negative")
    found = {"positive": text.count('"positive"'), "negative": text.count('"negative"')}
    for number, kind in re.findall(r"(\d+) (positive|negative)", text):
        found[kind] += int(number)
    return Reply(f"{found['positive']} positive, {found['negative']} negative")
