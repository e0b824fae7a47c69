"""Makes arithmetic word problems with whole-number answers: `python problems.py 1000 > my.jsonl`.

Each takes 1 to 8 uses of a calculator. The same seed always gives the same problems.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PEOPLE = (
    "Amina", "Bruno", "Chen", "Daria", "Emeka", "Freya", "Goran", "Hana", "Ines", "Jonas",
    "Keiko", "Lars", "Maya", "Noor", "Otto", "Priya", "Quentin", "Rosa", "Samir", "Tove",
)  # fmt: skip
THINGS = (
    "apples", "beads", "books", "buttons", "candles", "coins", "eggs", "lemons", "marbles",
    "nails", "pencils", "postcards", "seeds", "shells", "spoons", "stamps", "tiles", "tulips",
)  # fmt: skip
MOST_CALLS = 8
_LARGE = 50_000


@dataclass
class Story:
    """A problem while it is written: its sentences, and what must be calculated for them."""

    random: random.Random
    person: str
    things: str
    value: int = 0
    sentences: list[str] = field(default_factory=list)
    expressions: list[str] = field(default_factory=list)

    def tell(self, sentence: str, value: int, *expressions: str) -> None:
        """Add a sentence after which there are `value` things."""
        self.sentences.append(sentence)
        self.expressions.extend(expressions)
        self.value = value

    def number(self, low: int, high: int) -> int:
        """Return a number from `low` to `high`."""
        return self.random.randint(low, high)

    @property
    def text(self) -> str:
        """The whole problem."""
        question = f"How many {self.things} does {self.person} have in the end?"
        return " ".join([*self.sentences, question])


def problems(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Make `count` different problems as lines of a batch file."""
    rng = random.Random(seed)  # noqa: S311 - problems are no secrets
    known: set[str] = set()
    while len(known) < count:
        calls = len(known) % MOST_CALLS + 1
        story = write(rng, calls)
        # One calculation twice would need one call less than announced.
        if story.text in known or len(set(story.expressions)) < calls:
            continue
        known.add(story.text)
        yield {
            "id": f"problem-{len(known):05d}",
            "input": story.text,
            "metadata": {"answer": story.value, "calls": calls},
        }


def write(rng: random.Random, calls: int) -> Story:
    """Write one problem that takes `calls` calculations."""
    story = Story(rng, rng.choice(PEOPLE), rng.choice(THINGS))
    _open(story, calls)
    while len(story.expressions) < calls:
        _go_on(story, calls - len(story.expressions))
    return story


def _open(story: Story, calls: int) -> None:
    a, b, c, d = (story.number(3, 40) for _ in range(4))
    kinds = ["some", "boxes"] + (["boxes and bags"] * 2 if calls >= 3 else [])  # noqa: PLR2004 - it takes 3
    match story.random.choice(kinds):
        case "some":
            story.tell(f"{story.person} starts with {a * b} {story.things}.", a * b)
        case "boxes":
            sentence = f"{story.person} fills {a} boxes with {b} {story.things} each."
            story.tell(sentence, a * b, f"{a} * {b}")
        case _:
            story.tell(
                f"{story.person} packs {a} boxes with {b} {story.things} each and {c} bags "
                f"with {d} {story.things} each.",
                a * b + c * d,
                f"{a} * {b}",
                f"{c} * {d}",
                f"{a * b} + {c * d}",
            )


def _go_on(story: Story, calls: int) -> None:
    """Add one sentence that takes at most `calls` calculations."""
    value, n = story.value, story.number(2, 90)
    other = story.random.choice([one for one in PEOPLE if one != story.person])
    divisors = [one for one in range(2, 13) if value % one == 0 and value > one]
    kinds = ["more", "sold"]
    kinds += ["times"] if value < _LARGE else []
    kinds += ["shared"] if divisors else []
    kinds += ["crates"] if calls > 1 else []
    match story.random.choice(kinds):
        case "times":
            n = story.number(2, 9)
            sentence = f"Overnight the number becomes {n} times as large."
            story.tell(sentence, value * n, f"{value} * {n}")
        case "shared":
            n = story.random.choice(divisors)
            shared = f"They are divided equally among {n} friends, and {story.person} keeps one"
            story.tell(f"{shared} share.", value // n, f"{value} / {n}")
        case "crates":
            b = story.number(5, 60)
            sentence = f"A van delivers {n} crates of {b}."
            story.tell(sentence, value + n * b, f"{n} * {b}", f"{value} + {n * b}")
        case "sold" if value > 1:
            n = story.number(1, min(value - 1, 90))
            story.tell(f"Then {n} of them are sold.", value - n, f"{value} - {n}")
        case _:
            story.tell(f"{other} brings {n} more.", value + n, f"{value} + {n}")


def main() -> None:
    """Print problems as JSON lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("count", type=int, nargs="?", default=40)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    for line in problems(asked.count, asked.seed):
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
