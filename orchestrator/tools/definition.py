"""The definition of a tool, and the `@tool` decorator that makes one of a function.

Knows nothing of runs; workers execute, time and record calls.
"""

import asyncio
import inspect
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload, runtime_checkable

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.calls.answers import Awaited
from stepfleet.orchestrator.records.calls.tools import ToolSpec
from stepfleet.orchestrator.records.text.validation import meant
from stepfleet.orchestrator.references import load_reference
from stepfleet.orchestrator.tools.invocation import ToolInvocation
from stepfleet.orchestrator.tools.schemas.checks import checker_of
from stepfleet.orchestrator.tools.schemas.from_signature import parameters_of, unbound
from stepfleet.orchestrator.tools.schemas.handles import fits_strict_mode

P = ParamSpec("P")
R = TypeVar("R")

StatusHook = Callable[[ToolInvocation], Any]
NeedsApproval = Callable[[ToolInvocation], Any]
DECISIONS = ("deny", "approve")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_QUEUE = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_MAX_TIMEOUT = 7 * 24 * 3600


@runtime_checkable
class ToolLike(Protocol):
    """The attributes of a class that serves as a tool. `schema` is the JSON Schema of an object.

    `execute` may be a coroutine function or a plain one. The attributes of `ToolOptions` are
    read too where the object has them.
    """

    name: str
    description: str
    schema: Mapping[str, Any]

    def execute(self, **kwargs: Any) -> Any:
        """Run the tool."""


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """How a tool may be executed.

    `timeout` is in seconds; None means the worker's default. An idempotent tool may be run
    again when the outcome of an earlier start is unknown; by default that holds for tools that are
    `read_only`. `queue` makes each call a Celery task of its own on that queue; the run
    waits for it without a worker's slot, and `timeout` counts from the call's start there.
    `thread=False` runs a plain function inside the event loop: only for those that take
    microseconds. `status`, a plain or coroutine function, is called for a call that is not
    idempotent and whose worker was lost: it gets the `ToolInvocation` as `invocation`, with the
    call's `arguments`. It returns `Done(result)`, `CallStatus.NOT_DONE` (the call is run) or
    `CallStatus.UNKNOWN`; any other value is the result too, and None means unknown. `strict=True`
    lets the provider hold the arguments to the schema where it can, and wants a schema that
    strict modes take; by default OpenAI's and Azure's models do so for such schemas.
    With `approval` a call waits, without a slot, until a person approves or denies it; a function,
    plain or coroutine, is given the `ToolInvocation` with the arguments and returns whether that
    call needs it. After `approval_timeout` seconds `approval_default` is the decision: "deny" (as
    without it) or "approve".
    """

    timeout: float | None = None
    read_only: bool = False
    idempotent: bool | None = None
    queue: str | None = None
    version: str = "1"
    thread: bool = True
    status: StatusHook | None = None
    strict: bool | None = None
    approval: bool | NeedsApproval = False
    approval_timeout: float | None = None
    approval_default: str | None = None


@dataclass(frozen=True, eq=False)
class Tool(Generic[P, R]):
    """A function that a model can call; calling the object calls the function."""

    name: str
    description: str
    schema: Mapping[str, Any]
    function: Callable[P, R]
    check: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Returns the keyword arguments for `function`, or raises `ToolArgumentsError`."""
    options: ToolOptions = ToolOptions()

    def __post_init__(self) -> None:
        """Refuse names and options that cannot work; raises `ConfigurationError`."""
        _check_tool(self)
        # inspect.signature() follows it, and shows the function's parameters.
        object.__setattr__(self, "__wrapped__", self.function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function as if it were not decorated."""
        return self.function(*args, **kwargs)

    @property
    def version(self) -> str:
        """The tool's version; a run remembers the one it started with."""
        return self.options.version

    @property
    def idempotent(self) -> bool:
        """Whether a call whose outcome is unknown may be run again."""
        declared = self.options.idempotent
        return self.options.read_only if declared is None else declared

    @cached_property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function."""
        return is_async(self.function)

    @property
    def blocking(self) -> bool:
        """Whether calls run in a thread."""
        return self.options.thread and not self.is_async

    @property
    def instant(self) -> bool:
        """Whether a call is over before a note of it could reach Redis, and may be repeated."""
        options = self.options
        if self.is_async or options.approval or getattr(self.function, "takes_time", False):
            return False
        return options.read_only and not options.thread and not options.queue

    @property
    def spec(self) -> ToolSpec:
        """The tool as a model sees it."""
        return ToolSpec(
            name=self.name,
            description=self.description,
            parameters=dict(self.schema),
            strict=self.options.strict,
        )

    async def execute(self, /, **kwargs: Any) -> Any:
        """Check the JSON arguments and run the function, in a thread if it blocks.

        Raises `ToolArgumentsError`, and all exceptions of the function.
        """
        bound = self.check(kwargs)
        function: Callable[..., Any] = self.function
        value = await asyncio.to_thread(function, **bound) if self.blocking else function(**bound)
        return await value if inspect.isawaitable(value) else value


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...
@overload
def tool(
    *,
    name: str | None = ...,
    description: str | None = ...,
    timeout: float | None = ...,
    idempotent: bool | None = ...,
    read_only: bool = ...,
    queue: str | None = ...,
    version: str = ...,
    thread: bool = ...,
    status: StatusHook | None = ...,
    strict: bool | None = ...,
    approval: bool | NeedsApproval = ...,
    approval_timeout: float | None = ...,
    approval_default: str | None = ...,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    **options: Any,
) -> Any:
    """Make a tool of a function; use it bare or with options.

    Name, description and JSON Schema come from the function's name, docstring (Google, NumPy
    or reST style) and type hints. `options` are the fields of `ToolOptions`. Raises
    `ConfigurationError` where a model could not call the function, with the fix.
    """

    def make(function: Callable[..., Any]) -> Tool[..., Any]:
        named = unbound(function)
        called = name or str(getattr(named, "__name__", type(named).__name__))
        _check_function(function, called)
        parameters = parameters_of(function, called)
        return Tool(
            name=called,
            description=parameters.description if description is None else description,
            schema=parameters.schema,
            function=function,
            check=parameters.check,
            options=_options(called, options),
        )

    return make if function is None else make(function)


def as_tool(given: Any) -> Tool[..., Any]:
    """Return `given`, a tool or an object with the `ToolLike` protocol, as a `Tool`.

    Raises `ConfigurationError` for anything else.
    """
    if isinstance(given, Tool):
        return given
    if isinstance(given, type):
        raise ConfigurationError(f"tool {given.__name__!r} is a class; give an instance of it")
    if not isinstance(given, ToolLike):
        raise ConfigurationError(_not_a_tool(given))
    names = ToolOptions.__dataclass_fields__
    options = {one: getattr(given, one) for one in names if hasattr(given, one)}
    return Tool(
        name=given.name,
        description=given.description,
        schema=given.schema,
        function=given.execute,
        check=checker_of(given.name, given.schema),
        options=ToolOptions(**options),
    )


def lazy_tool(
    reference: str,
    *,
    name: str,
    description: str,
    schema: Mapping[str, Any],
    **options: Any,
) -> Tool[..., Any]:
    """Return the tool of `module:attribute`, without importing it.

    For code whose import is slow or large, or that only the machines of its queue have.

    `schema` is the JSON Schema of its arguments, `options` are the fields of `ToolOptions`; the
    code's own options are ignored. The first call imports it, in a thread, and its own
    check sees the arguments as well. Raises `ConfigurationError` for a reference without `:`.
    """
    module, _, attribute = reference.partition(":")
    if not module or not attribute:
        raise ConfigurationError(f"tool {name!r}: write module:attribute, not {reference!r}")
    return Tool(
        name=name,
        description=description,
        schema=schema,
        function=_LazyFunction(reference),
        check=checker_of(name, schema),
        options=_options(name, options),
    )


class _LazyFunction:
    """The function of a tool whose code is imported at its first call, in a thread."""

    takes_time = True

    def __init__(self, reference: str) -> None:
        self._reference = reference
        self._loaded: Tool[..., Any] | None = None
        self._loading = threading.Lock()

    def __call__(self, **arguments: Any) -> Any:
        if self._loaded is None:
            with self._loading:
                self._loaded = self._loaded or as_tool(load_reference(self._reference, "tool"))
        tool = self._loaded
        return tool.function(**tool.check(arguments))


def _not_a_tool(given: Any) -> str:
    if callable(getattr(given, "as_tool", None)):  # an agent
        name = getattr(given, "name", "")
        return f"agent {name!r} is not a tool; write it into agents=[...], or give its as_tool()"
    if callable(given) and hasattr(given, "__name__"):
        return f"function {given.__name__!r} is not a tool; put @tool above it"
    lacking = [
        one for one in ("name", "description", "schema", "execute") if not hasattr(given, one)
    ]
    return (
        f"an object of type {type(given).__name__!r} is not a tool; it lacks {', '.join(lacking)}"
    )


def _options(tool: str, given: Mapping[str, Any]) -> ToolOptions:
    known = ToolOptions.__dataclass_fields__
    for name in given:
        if name not in known:
            hint = meant(name, known) or f"; there are {', '.join(known)}"
            raise ConfigurationError(f"tool {tool!r}: option {name!r} is not known{hint}")
    return ToolOptions(**given)


def is_async(function: Any) -> bool:
    """Return whether calling `function` gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object whose call is a coroutine
    )


def _check_function(function: Any, name: str) -> None:
    if not callable(function) or isinstance(function, type):
        raise ConfigurationError(f"tool {name!r}: @tool goes above a function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"tool {name!r} yields; return the whole value instead")


def _check_tool(tool: Tool[..., Any]) -> None:
    if not isinstance(tool.name, str) or not _NAME.fullmatch(tool.name):
        raise ConfigurationError(
            f"tool {tool.name!r}: name must be 1 to 64 letters, digits, _ or -; "
            'give another by @tool(name="...")'
        )
    timeout = tool.options.timeout
    if timeout is not None and not 0 < timeout <= _MAX_TIMEOUT:
        raise ConfigurationError(
            f"tool {tool.name!r}: timeout must be seconds, above 0 and at most {_MAX_TIMEOUT} (7 "
            f"days), and is {timeout!r}"
        )
    if tool.options.strict and not fits_strict_mode(dict(tool.schema)):
        raise ConfigurationError(
            f"tool {tool.name!r}: strict=True, and strict modes do not take its schema; give "
            "no parameter a default (use X | None), type them all, and use no dict, "
            "limits or formats"
        )
    _check_approval(tool.name, tool.options)
    queue = tool.options.queue
    if queue is None or isinstance(queue, Awaited):
        return
    if not isinstance(queue, str) or not _QUEUE.fullmatch(queue):
        raise ConfigurationError(
            f"tool {tool.name!r}: queue must be 1 to 100 letters, digits, _, . or -, and is "
            f"{queue!r}"
        )


def _check_approval(name: str, options: ToolOptions) -> None:
    rule, within, default = options.approval, options.approval_timeout, options.approval_default
    if not isinstance(rule, bool) and not callable(rule):
        raise ConfigurationError(
            f"tool {name!r}: approval is {rule!r}; write True, False or a function"
        )
    is_number = isinstance(within, int | float) and not isinstance(within, bool)
    if within is not None and not (is_number and 0 < within <= _MAX_TIMEOUT):
        raise ConfigurationError(
            f"tool {name!r}: approval_timeout must be seconds, above 0 and at most "
            f"{_MAX_TIMEOUT} (7 days), and is {within!r}"
        )
    if default not in (None, *DECISIONS):
        raise ConfigurationError(
            f"tool {name!r}: approval_default is {default!r}; write 'deny' or 'approve'"
        )
    if within is not None and rule is False:
        raise ConfigurationError(
            f"tool {name!r}: approval_timeout is {within!r}, and no call waits for an approval; "
            "add approval=True, or approval=FUNCTION for some of its calls"
        )
    if default is not None and within is None:
        raise ConfigurationError(
            f"tool {name!r}: approval_default is {default!r}, and nothing says when it decides; "
            "add approval_timeout=SECONDS"
        )
