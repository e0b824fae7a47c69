"""Reads JSON of services, some of which write it in other ways than its standard has it.

Tolerated, and named in the log: NaN and infinities, lone surrogates, bytes that are no UTF-8, a
byte order mark, control characters in texts. A paid answer is not to be lost by any of them.
Everything else that is no JSON stays refused.
"""

import json
import logging
from typing import Any

import orjson
from pydantic_core import from_json

from stepfleet.orchestrator.records.exact_json import MAX_DIGITS
from stepfleet.worker.toolbox.failure_log import Equals

log = logging.getLogger(__name__)

MOST_SIGNS = 2_000_000
"""Brackets, commas and colons that a text may have. While the parser makes values of them no thread
of the process runs, and in an answer of 16 MiB that can be many seconds."""

_SIGNS = (b",", b":", b"[", b"{")
_equals = Equals()


def read_json(data: bytes) -> Any:
    """Return the value of `data`; whole numbers of up to 4,300 digits are exact.

    NaN and infinities are those of `float`, as are longer numbers; lone surrogates stay in texts.
    Raises `orjson.JSONDecodeError` where it is no JSON, and where it may have far more values than
    an answer has.
    """
    if len(data) > MOST_SIGNS and sum(map(data.count, _SIGNS)) > MOST_SIGNS:
        raise orjson.JSONDecodeError(f"more than {MOST_SIGNS} brackets, commas and colons", "", 0)
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        return _read_leniently(data, str(error).partition(" at line ")[0])


def _read_leniently(data: bytes, why: str) -> Any:
    text = data.decode("utf-8-sig", "replace")
    constants: list[str] = []

    def constant(word: str) -> float:
        constants.append(word)
        return float(word)

    decoder = json.JSONDecoder(strict=False, parse_int=_whole, parse_constant=constant)
    try:
        value = decoder.decode(text)
    except json.JSONDecodeError as error:
        raise orjson.JSONDecodeError(error.msg, text, error.pos) from None
    except RecursionError:
        raise orjson.JSONDecodeError("nested too deep", "", 0) from None
    why = constants[0] if constants else why
    if (left_out := _equals.left_out(why)) is not None:
        more = f" ({left_out} more like it were not logged)" if left_out else ""
        log.warning("a service's answer is no standard JSON (%s), and is read%s", why, more)
    return value


def _whole(digits: str) -> float:
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)
