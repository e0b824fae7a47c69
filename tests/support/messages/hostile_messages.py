"""Messages that a stranger may put into a fleet's queue, by name, with a part of the reason told.

What is large is made on the spot, so that a test process does not keep it. Knows no workers.
"""

import base64
import json
import pickle
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

DEEP = 200_000
BOMB_BYTES = 1024 * 1024 * 1024


def message(body: bytes = b'[["no-such-run", 0], {}, {}]', **changes: Any) -> dict[str, Any]:
    """Return a step's message as Celery sends it, with some fields replaced."""
    made: dict[str, Any] = {
        "body": base64.b64encode(body).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"lang": "py", "task": "stepfleet.step", "id": "i", "root_id": "i"},
        "properties": {
            "body_encoding": "base64",
            "delivery_tag": "t",
            "delivery_info": {"exchange": "", "routing_key": "stepfleet"},
            "priority": 0,
        },
    }
    for path, value in changes.items():
        *where, last = path.split("__")
        target = made
        for step in where:
            target = target[step]
        target[last.replace("_", "-") if last.startswith("content") else last] = value
    return made


def raw(body: bytes = b'[["no-such-run", 0], {}, {}]', **changes: Any) -> bytes:
    """Return the message's bytes."""
    return json.dumps(message(body, **changes)).encode()


def arguments(*args: Any, **kwargs: Any) -> bytes:
    """Return a step's message with those arguments."""
    return raw(json.dumps([args, kwargs, {}]).encode())


def tool_arguments(*args: Any, **kwargs: Any) -> bytes:
    """Return a tool call's message with those arguments."""
    return raw(json.dumps([args, kwargs, {}]).encode(), headers__task="stepfleet.tool")


@cache
def bomb() -> bytes:
    """Return a gigabyte of zeros, compressed."""
    packer = zlib.compressobj(9)
    piece = bytes(1024 * 1024)
    packed = [packer.compress(piece) for _ in range(BOMB_BYTES // len(piece))]
    return b"".join([*packed, packer.flush()])


class Evil:
    """Unpickling it would write down that it was unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("open('pickled', 'w').close()",))


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "garbage": (lambda: b"\xff\x00 not json", "cannot be decoded"),
    "a list": (lambda: b"[1, 2]", "a JSON list"),
    "deep": (lambda: b"[" * DEEP + b"]" * DEEP, "cannot be decoded"),
    "deep body": (lambda: raw(b"[" * DEEP + b"]" * DEEP), "body cannot be decoded"),
    "bad base64": (lambda: json.dumps(message() | {"body": "a"}).encode(), "not valid base64"),
    "a bomb": (lambda: raw(bomb(), headers__compression="application/x-gzip"), "compressed"),
    "a bomb without a header": (
        lambda: raw(bomb(), content_encoding="zlib_codec"),
        "body cannot be decoded",
    ),
    "oversized": (lambda: raw(b"1" * 5_000_000), "larger than"),
    "pickle": (
        lambda: raw(pickle.dumps(Evil()), content_type="application/x-python-serialize"),
        "only application/json is taken",
    ),
    "pickle under another name": (lambda: raw(pickle.dumps(Evil())), "body cannot be decoded"),
    "yaml": (
        lambda: raw(b"!!python/object/apply:os.abort []", content_type="application/x-yaml"),
        "only application/json is taken",
    ),
    "no content type": (lambda: raw(content_type=None), "only application/json is taken"),
    "a long header": (lambda: raw(headers__shadow="x" * 100_000), "header 'shadow' is longer"),
    "an option that Celery does not know": (
        lambda: raw(b'[["r", 0], {}, {"is_eager": true}]'),
        "fields that Celery does not know",
    ),
    "a task of nobody": (lambda: raw(headers__task="os.abort"), "has no task 'os.abort'"),
    "no task": (lambda: raw(b"{}", headers={}), "asks for no task"),
    "an old protocol": (
        lambda: raw(b'{"task": "stepfleet.step", "id": "i", "args": 7, "kwargs": {}}', headers={}),
        "of Celery's task protocol 1",
    ),
    "half an old protocol": (
        lambda: raw(b'{"task": "stepfleet.step", "id": "i", "args": 7, "kwargs": {}}'),
        "the body is not [args",
    ),
    "a date that is none": (lambda: raw(headers__eta="tomorrow"), "could not take it"),
    "no arguments": (arguments, "arguments are not run_id, step"),
    "more arguments": (lambda: arguments("run", 0, 0), "arguments are not run_id, step"),
    "named arguments": (lambda: arguments("run", 0, x=1), "arguments are not run_id, step"),
    "a run id of a wrong type": (lambda: arguments(["run"], 0), "run_id must be text"),
    "a long run id": (lambda: arguments("r" * 1000, 0), "run_id must be text"),
    "a step below the first": (lambda: arguments("run", -1), "step must be an integer"),
    "a step of a wrong type": (lambda: arguments("run", "0"), "step must be an integer"),
    "a tool call without index": (
        lambda: tool_arguments("run", 0),
        "arguments are not run_id, step, index",
    ),
    "a tool call of a wrong type": (
        lambda: tool_arguments("run", 0, "1"),
        "index must be an integer",
    ),
}


def all_hostile() -> Iterator[bytes]:
    """Make every hostile message in turn."""
    for make, _ in HOSTILE.values():
        yield make()
