"""Says whether a text reads like a plan, by the words in it. A hint, never a decision alone."""

import re

INDICATORS = (
    "plan",
    "approach",
    "strategy",
    "steps:",
    "first",
    "then",
    "finally",
    "need to",
    "should",
    "will use",
)
"""Words of which one is enough. Whole words, or `plan` would be found in a planet."""

_INFLECTED = {"plan": r"plan(?:s|ned|ning)?", "approach": "approach(?:es)?"}
_MOST_READ = 64 * 1024
_WORD = re.compile(
    r"\b(?:"
    + "|".join(_INFLECTED.get(one, re.escape(one)) for one in INDICATORS)
    + r"|strategies)(?!\w)",
    re.IGNORECASE,
)


def is_planning_response(text: str) -> bool:
    """Return whether one of the indicator words stands in `text`, in upper or lower case.

    Of a longer text the first 64 K characters count.
    """
    return _WORD.search(text, 0, _MOST_READ) is not None
