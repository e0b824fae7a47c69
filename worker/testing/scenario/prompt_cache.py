"""The prompt caches of services: which beginnings of prompts were read, and which are kept.

A prompt is `tokens` long; `readable` and `kept` are places in it, each the digest of all before it
and its tokens. Sizes are estimates, always alike for equal beginnings.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from stepfleet.worker.testing.scenario.replies import Usage

LIFE = 300.0
"""Seconds for which an entry lives after it was last read or written."""
LEAST = 1024
"""Tokens of the shortest beginning that is cached."""
LOOKED_BACK = 20
"""Blocks before a mark, in which an entry is looked for."""
_STEP = 128
_BYTES_PER_TOKEN = 4
_MOST_ENTRIES = 200_000

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as a cache sees it; `paid` says whether usage counts what is written."""

    tokens: int
    readable: tuple[Place, ...] = ()
    kept: tuple[Place, ...] = ()
    paid: bool = False


def automatic(model: str, text: bytes) -> Prompt:
    """Return a prompt whose beginnings of 1,024 tokens, and each 128 more, are kept unasked."""
    tokens = len(text) // _BYTES_PER_TOKEN
    places = tuple(_steps(model, text, tokens)) if tokens >= LEAST else ()
    return Prompt(tokens, places, places)


def _steps(model: str, text: bytes, tokens: int) -> Iterator[Place]:
    digest, begin = hash(model), 0
    for size in range(LEAST, tokens + 1, _STEP):
        end = size * _BYTES_PER_TOKEN
        digest, begin = hash((digest, text[begin:end])), end
        yield digest, size


def marked(model: str, blocks: Sequence[tuple[bytes, bool]]) -> Prompt:
    """Return a prompt of which the beginnings that end at marked blocks are kept.

    A mark finds an entry that ends at most 20 blocks before it.
    """
    ends: list[Place] = [(hash(model), 0)]
    for data, _ in blocks:
        digest, size = ends[-1]
        ends.append((hash((digest, data)), size + len(data)))
    counted = [(digest, size // _BYTES_PER_TOKEN) for digest, size in ends]
    marks = [place for place, (_, is_marked) in enumerate(blocks, 1) if is_marked]
    near = {place for mark in marks for place in range(max(mark - LOOKED_BACK, 1), mark + 1)}
    return Prompt(
        counted[-1][1],
        tuple(counted[place] for place in near),
        tuple(counted[mark] for mark in marks if counted[mark][1] >= LEAST),
        paid=True,
    )


@dataclass
class PromptCache:
    """The beginnings that one service keeps, each until 5 minutes after its last use."""

    _entries: OrderedDict[int, float] = field(default_factory=OrderedDict)

    def usage(self, prompt: Prompt, usage: Usage, now: float) -> Usage:
        """Return the usage with the tokens that are read and written; `now` is in seconds."""
        known = self._entries
        read = max((size for end, size in prompt.readable if known.get(end, 0) > now), default=0)
        longest = max((size for _, size in prompt.kept), default=0) if prompt.paid else 0
        return replace(usage, cached_tokens=read, cache_write_tokens=max(longest - read, 0))

    def keep(self, prompt: Prompt, now: float) -> None:
        """Keep the prompt's beginnings, and those that it has read, from now on."""
        entries = self._entries
        read = [end for end, _ in prompt.readable if entries.get(end, 0) > now]
        for end in (*read, *(end for end, _ in prompt.kept)):
            entries[end] = now + LIFE
            entries.move_to_end(end)
        while entries and (len(entries) > _MOST_ENTRIES or next(iter(entries.values())) <= now):
            entries.popitem(last=False)
