import math
import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from pathlib import PurePosixPath
from typing import Any

import pytest
from pydantic import BaseModel

from stepfleet.orchestrator import ErrorInfo, ErrorType, ToolCallRecord
from stepfleet.orchestrator.errors import ToolExecutionError
from stepfleet.orchestrator.records.conversation.messages import result_text
from stepfleet.worker.toolbox.results import json_data


class Shade(Enum):
    DARK = "dark"


class Spot(BaseModel):
    at: datetime
    inner: list["Spot"] = []


@dataclass
class Pair:
    left: Any
    right: Any


MOMENT = datetime(2024, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "data"),
    [
        ("text\x00", "text\x00"),
        (None, None),
        (True, True),
        (10**30, 10**30),
        (1.5, 1.5),
        ((1, [2]), [1, [2]]),
        ({1: "a", None: "b", False: "c"}, {"1": "a", "null": "b", "false": "c"}),
        ({3}, [3]),
        (Shade.DARK, "dark"),
        (MOMENT, "2024-05-01T12:00:00Z"),
        (date(2024, 5, 1), "2024-05-01"),
        (Decimal("1.10"), "1.10"),
        (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        (PurePosixPath("/a"), "/a"),
        (Spot(at=MOMENT), {"at": "2024-05-01T12:00:00Z", "inner": []}),
        (Pair(Shade.DARK, Pair(1, 2)), {"left": "dark", "right": {"left": 1, "right": 2}}),
    ],
)
def test_what_json_has_a_form_for_is_converted(value: Any, data: Any) -> None:
    """TOOL-09, MSG-19"""
    assert json_data(value) == data


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (b"x", "result is bytes; return text, base64"),
        ({"a": [1, bytearray(b"x")]}, "result.a[1] is bytes"),
        (math.nan, "result is nan, which JSON does not have"),
        ([math.inf], "result[0] is inf"),
        ({"a": math.nan}, "result.a is nan"),
        ("\ud800", "holds a lone surrogate"),
        ({"\ud800": 1}, "result's keys holds a lone surrogate"),
        ({(1, 2): 1}, "result has a key of type tuple; use text keys"),
        pytest.param(10**4300, "more than 4300 digits", id="digits"),
        (object(), "result is of type builtins.object; return text"),
        (Pair(1, lambda: 1), "result.right is of type builtins.function"),
        (deep(101), "nested deeper than 100 levels"),
        ("x" * 262_145, "larger than the limit of 262144 bytes; return less"),
        ("ä" * 131_073, "larger than the limit of 262144 bytes; return less"),
        ([0] * 10**6, "larger than the limit of 262144 bytes; return less"),
        (["x" * 1000] * 262, "larger than the limit of 262144 bytes; return less"),
    ],
)
def test_what_json_does_not_have_is_an_error_that_names_place_and_fix(
    value: Any, says: str
) -> None:
    """TOOL-09: nothing is cut or replaced silently."""
    with pytest.raises(ToolExecutionError) as caught:
        json_data(value)
    assert says in caught.value.message


def test_what_is_just_within_the_bounds_is_kept_whole() -> None:
    """TOOL-09"""
    assert json_data("x" * 262_144) == "x" * 262_144
    assert json_data(deep(100)) == deep(100)


def test_a_value_that_contains_itself_is_an_error() -> None:
    """TOOL-09"""
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ToolExecutionError, match="nested deeper"):
        json_data(loop)


def record(result: Any = None, error: ErrorInfo | None = None) -> ToolCallRecord:
    return ToolCallRecord(
        tool_name="t",
        call_id="c",
        result=result,
        error=error,
        is_error=error is not None,
        timestamp=MOMENT,
    )


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ('plain "text"', 'plain "text"'),
        ("", ""),
        ({"a": [1, None]}, '{"a": [1, null]}'),
        (["ä"], '["ä"]'),
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (7, "7"),
        (0.5, "0.5"),
    ],
)
def test_a_value_becomes_text_predictably(result: Any, text: str) -> None:
    """MSG-19: strings as is, mappings and lists as JSON, the rest as its JSON word."""
    assert result_text(record(result)) == text


def test_an_error_becomes_a_prefix_and_structured_json() -> None:
    """TOOL-25, MSG-19"""
    error = ErrorInfo(
        type=ErrorType.TIMEOUT, code="TIMEOUT_ERROR", message='too "slow"', retryable=True
    )
    assert result_text(record(error=error)) == (
        'Error: {"error": {"code": "TIMEOUT_ERROR", "message": "too \\"slow\\"", '
        '"retryable": true}}'
    )
