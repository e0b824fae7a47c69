"""The traceback of user code as text: frames without values, bounded, without secrets.

Frames of Stepfleet, and those of its libraries above the user's code, tell its users nothing: an
error in which no code of theirs took part has no traceback. Knows nothing of runs and logs.
"""

import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

from stepfleet.orchestrator.records.base import well_formed
from stepfleet.orchestrator.records.text.redaction import redact

MOST_FRAMES = 20
MOST_CHAINED = 4
LONGEST = 4000
"""Characters of a traceback; its end is kept."""
LONGEST_PART = 500
_READ = 8 * LONGEST_PART
_OWN = ("stepfleet.orchestrator.", "stepfleet.worker.")
_LIBRARIES = frozenset(
    """aiohttp anyio celery greenlet hiredis httpcore httpx jsonschema kombu mcp orjson pydantic
    pydantic_core redis yarl""".split()  # noqa: SIM905 - a list of fifteen lines otherwise
)
_STANDARD = str(Path(os.__file__).parent)
_INSTALLED = ("site-packages", "dist-packages")
_BECAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"


def traceback_of(error: BaseException) -> str | None:
    """Return the user's part of the error's traceback and of its causes'; None without one."""
    found: list[tuple[BaseException, list[tuple[FrameType, int]], str]] = []
    for one, link in _chain(error):
        if frames := _users_frames(one.__traceback__):
            found.append((one, frames, link))
    if not found:
        return None
    parts: list[str] = []
    for place, (one, frames, _) in enumerate(reversed(found)):
        if place:
            parts.append(found[-place][2])
        parts += _written(one, frames)
    # Redacted before it is cut: part of a secret would not be recognized.
    clean = redact("\0".join(part[:_READ] for part in parts)).split("\0")
    text = well_formed("".join(map(_short, clean))).rstrip("\n")
    if len(text) > LONGEST:
        text = f"... ({len(text) - LONGEST} characters before)\n{text[-LONGEST:]}"
    return text


def place_of(text: str) -> str:
    """Return the frames of a traceback: equal for equal causes, whatever the messages say."""
    return "\n".join(line for line in text.splitlines() if line.startswith('  File "'))


def _chain(error: BaseException) -> Iterator[tuple[BaseException, str]]:
    """Yield the error and what it came from, each with its link to the one before it here."""
    seen: set[int] = set()
    one: BaseException | None = error
    link = ""
    while one is not None and id(one) not in seen and len(seen) < MOST_CHAINED:
        seen.add(id(one))
        yield one, link
        link = _BECAUSE
        if isinstance(one, BaseExceptionGroup):
            one = one.exceptions[0]
        elif one.__cause__ is not None:
            one = one.__cause__
        else:
            one, link = None if one.__suppress_context__ else one.__context__, _DURING


def _users_frames(found: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Return the newest frames from the first of the user's code on, without our own."""
    frames: list[tuple[FrameType, int]] = []
    for frame, line in traceback.walk_tb(found):
        if not _is_ours(frame) and (frames or not _is_of_library(frame)):
            frames.append((frame, line))
    return frames[-MOST_FRAMES:]


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_OWN)


def _is_of_library(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    module = str(frame.f_globals.get("__name__", ""))
    if path.startswith("<frozen") or module.partition(".")[0] in _LIBRARIES:
        return True
    return path.startswith(_STANDARD) and not any(one in path for one in _INSTALLED)


def _written(error: BaseException, frames: list[tuple[FrameType, int]]) -> Iterator[str]:
    yield "Traceback (most recent call last):\n"
    yield from traceback.StackSummary.extract(iter(frames)).format()
    yield from traceback.format_exception_only(type(error), error)


def _short(part: str) -> str:
    return part if len(part) <= LONGEST_PART else f"{part[:LONGEST_PART]} ...\n"
