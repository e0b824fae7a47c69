"""Tools that ship with the fleet, ready for an agent's list of tools.

The calculator reads a syntax tree, within bounds, and never calls `eval`: every operation is
checked before it is done, so that no expression takes more than milliseconds or makes a number of
more than some 1,200 digits. The web tools are in `web`.
"""

import ast
import math
import operator
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from stepfleet.orchestrator.errors import ConfigurationError, ToolArgumentsError
from stepfleet.orchestrator.records.calls.answers import Awaited
from stepfleet.orchestrator.tools.definition import Tool, tool
from stepfleet.orchestrator.tools.web import http_get, http_get_from

__all__ = ["ask_person", "calculator", "current_time", "http_get", "http_get_from"]

Number = int | float

MAX_LENGTH = 1000
"""Characters of an expression."""
MAX_DEPTH = 50
"""Levels of parentheses, signs and function calls."""
MAX_BITS = 4096
"""Bits of an integer, about 1,230 decimal digits."""

_MAX_FACTORIAL = 500
_MAX_PLACES = 1000


@tool(name="ask_person", idempotent=True, queue=Awaited.PERSON)
def _ask(question: str, options: list[str] | None = None) -> NoReturn:
    """Ask a person, and wait for the answer, however long it takes.

    Args:
        question: What you need to know, so that somebody can answer who has not seen the rest.
        options: The possible answers, if it must be one of them.
    """
    del question, options
    raise ConfigurationError("ask_person is answered by `stepfleet decide --answer`, on a fleet")


ask_person: Tool[..., Any] = _ask


@tool(read_only=True)
def current_time(timezone: str = "UTC") -> str:
    """Return the current date and time as ISO 8601 text with the offset from UTC.

    Args:
        timezone: Name of a time zone in the IANA database, for example Europe/Berlin.
    """
    try:
        zone = ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        # OSError: a name such as "Europe", which is a folder of the database.
        raise ToolArgumentsError(
            f"current_time: the time zone {timezone[:100]!r} is not known; use a name of the IANA "
            "database such as Europe/Berlin, or UTC"
        ) from None
    return datetime.now(zone).isoformat(timespec="seconds")


@tool(read_only=True, thread=False)
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression and return the number.

    Args:
        expression: Numbers, + - * / // % ** and parentheses; the functions abs, acos, asin,
            atan, atan2, ceil, cos, degrees, exp, factorial, floor, gcd, hypot, log, log10, log2,
            max, min, radians, round, sin, sqrt, tan; the constants e, pi and tau. Example:
            (2 + 3) * sqrt(16)
    """
    return str(evaluate(expression))


def evaluate(expression: str) -> Number:
    """Return the value of an arithmetic expression, as Python would compute it.

    Raises `ToolArgumentsError` that names the problem of the expression.
    """
    if len(expression) > MAX_LENGTH:
        raise _refused(f"the expression is longer than {MAX_LENGTH} characters; split it")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else "it is nested too deeply"
        raise _refused(f"{expression[:100]!r} is not an arithmetic expression: {reason}") from None
    try:
        return _value(tree.body, 0)
    except ZeroDivisionError:
        raise _refused("division by zero") from None
    except OverflowError:
        raise _too_large() from None
    except ValueError as error:  # sqrt(-1), log(0), ...
        raise _refused(f"a function is not defined there: {error}") from None


def _value(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise _refused(f"the expression is nested deeper than {MAX_DEPTH} levels")
    match node:
        case ast.Constant(value=value):
            return _constant(value)
        case ast.Name(id=name):
            return _named(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return +_value(operand, depth + 1)
        case ast.BinOp():
            return _chain(node, depth)
        case ast.Call():
            return _call(node, depth)
        case ast.Tuple():
            raise _refused("a comma separates arguments only; write 1000 instead of 1,000")
    raise _refused(f"{type(node).__name__} is not arithmetic; use numbers, operators and functions")


def _chain(node: ast.BinOp, depth: int) -> Number:
    # 1 + 2 + 3 + ... is one level, however long, though the tree leans to the left.
    links = [node]
    while isinstance(links[-1].left, ast.BinOp):
        links.append(links[-1].left)
    value = _value(links[-1].left, depth + 1)
    for link in reversed(links):
        value = _operation(link.op, value, _value(link.right, depth + 1))
    return value


def _operation(op: ast.operator, left: Number, right: Number) -> Number:
    if isinstance(op, ast.Pow):
        return _power(left, right)
    if isinstance(op, ast.BitXor):
        raise _refused("^ is not a power here; write **")
    found = _OPERATORS.get(type(op))
    if found is None:
        raise _refused(f"the operator {type(op).__name__} is not known; use + - * / // % **")
    return _checked(found(left, right))


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        if abs(base) > 1 and (abs(base).bit_length() - 1) * exponent > MAX_BITS:
            raise _too_large()
        if abs(base) > 1 and exponent > MAX_BITS:
            raise _too_large()
    value = base**exponent
    if isinstance(value, complex):
        raise _refused("a negative number has no real power of that exponent")
    return _checked(value)


def _call(node: ast.Call, depth: int) -> Number:
    if not isinstance(node.func, ast.Name):  # written out, it could be nested too deeply
        raise _refused(f"what is called there is not known; use {', '.join(_FUNCTIONS)}")
    if node.func.id not in _FUNCTIONS:
        name = node.func.id[:50]
        raise _refused(f"the function {name} is not known; use {', '.join(_FUNCTIONS)}")
    if node.keywords:
        raise _refused("functions take no named arguments here")
    arguments = [_value(one, depth + 1) for one in node.args]
    try:
        return _checked(_FUNCTIONS[node.func.id](*arguments))
    except TypeError as error:
        raise _refused(f"wrong arguments of {node.func.id}: {error}") from None


def _named(name: str) -> float:
    if name not in _CONSTANTS:
        raise _refused(f"the name {name[:50]} is not known; use {', '.join(_CONSTANTS)}")
    return _CONSTANTS[name]


def _constant(value: Any) -> Number:
    if type(value) not in (int, float):
        raise _refused(f"{str(value)[:50]!r} is not a number")
    return _checked(value)


def _checked(value: Any) -> Number:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise _too_large()
        return value
    if not math.isfinite(value):
        raise _too_large()
    return float(value)


def _round(value: Number, places: Number | None = None) -> Number:
    if places is None:
        return round(value)
    if not isinstance(places, int) or abs(places) > _MAX_PLACES:
        raise _refused(f"round takes whole places, at most {_MAX_PLACES}")
    return round(value, places)


def _factorial(value: Number) -> int:
    if not isinstance(value, int) or value > _MAX_FACTORIAL:
        raise _refused(f"factorial takes a whole number of at most {_MAX_FACTORIAL}")
    return math.factorial(value)


def _refused(why: str) -> ToolArgumentsError:
    return ToolArgumentsError(f"calculator: {why}")


def _too_large() -> ToolArgumentsError:
    return _refused(
        f"a number is too large (integers have at most {MAX_BITS} bits, others at most 1.8e308)"
    )


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CONSTANTS = {"e": math.e, "pi": math.pi, "tau": math.tau}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "max": max,
    "min": min,
    "round": _round,
    "factorial": _factorial,
    **{
        name: getattr(math, name)
        for name in (
            *("acos", "asin", "atan", "atan2", "ceil", "cos", "degrees", "exp", "floor", "gcd"),
            *("hypot", "log", "log10", "log2", "radians", "sin", "sqrt", "tan"),
        )
    },
}
