import builtins
import json
import pickle

import pytest
from support.runs.agent_records import a_result

from stepfleet.orchestrator import AgentException, ConfigurationError, ErrorInfo, ErrorType, errors
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.events.broadcast import SignatureError, WebhookError
from stepfleet.orchestrator.models.endpoint import ModelSetupError
from stepfleet.orchestrator.store.embedded.folder import EmbeddedRedisError
from stepfleet.orchestrator.tools.mcp import ToolSourceError

TREE = [
    (errors.ConfigurationError, errors.AgentException),
    (errors.NotFoundError, errors.ConfigurationError),
    (errors.ConflictError, errors.ConfigurationError),
    (errors.ToolExecutionError, errors.AgentException),
    (errors.ToolNotFoundError, errors.ToolExecutionError),
    (errors.ToolTimeoutError, errors.ToolExecutionError),
    (errors.ToolArgumentsError, errors.ToolExecutionError),
    (errors.InvalidToolCallError, errors.ToolExecutionError),
    (errors.ModelError, errors.AgentException),
    (errors.RateLimitError, errors.ModelError),
    (errors.ContextWindowError, errors.ModelError),
    (errors.ModelTimeoutError, errors.ModelError),
    (errors.StrategyError, errors.AgentException),
    (errors.AgentMemoryError, errors.AgentException),
    (errors.SerializationError, errors.AgentException),
    (errors.StoreError, errors.AgentException),
    (errors.MaxStepsExceeded, errors.AgentException),
    (errors.RunFailed, errors.AgentException),
    (errors.RunActive, errors.AgentException),
    (errors.StructuredDataError, errors.AgentException),
]
ELSEWHERE = (EmbeddedRedisError, ModelSetupError, SignatureError, ToolSourceError, WebhookError)
"""Beside what they are about, and not in the module of errors."""

CODES = [
    (errors.ConfigurationError("x"), "CONFIG_ERROR", ErrorType.UNKNOWN, False),
    (errors.ModelError("x"), "MODEL_ERROR", ErrorType.MODEL, False),
    (errors.ModelError("x", retryable=True), "MODEL_ERROR", ErrorType.MODEL, True),
    (errors.SerializationError("x"), "SERIALIZATION_ERROR", ErrorType.UNKNOWN, False),
    (errors.ToolArgumentsError("x"), "VALIDATION_ERROR", ErrorType.VALIDATION, True),
    (errors.ToolExecutionError("x"), "TOOL_EXECUTION_ERROR", ErrorType.TOOL, False),
    (errors.ToolNotFoundError("x"), "TOOL_NOT_FOUND", ErrorType.TOOL, False),
    (errors.InvalidToolCallError("x"), "INVALID_FUNCTION_CALL", ErrorType.VALIDATION, False),
    (errors.ToolTimeoutError("x"), "TIMEOUT_ERROR", ErrorType.TIMEOUT, True),
    (errors.ModelTimeoutError("x"), "TIMEOUT_ERROR", ErrorType.TIMEOUT, True),
    (errors.MaxStepsExceeded("x"), "MAX_ITERATIONS_EXCEEDED", ErrorType.UNKNOWN, False),
    (errors.RateLimitError("x"), "RATE_LIMIT_ERROR", ErrorType.RATE_LIMIT, True),
    (errors.StrategyError("x"), "UNKNOWN_ERROR", ErrorType.UNKNOWN, False),
]


@pytest.mark.parametrize(("child", "parent"), TREE)
def test_an_exception_has_its_place_in_the_tree(
    child: type[Exception], parent: type[Exception]
) -> None:
    """ERR-20"""
    assert issubclass(child, parent)


def test_the_eleven_codes_are_all_there() -> None:
    """ERR-26"""
    assert len({code for _, code, _, _ in CODES}) == 11


@pytest.mark.parametrize(("error", "code", "error_type", "retryable"), CODES)
def test_an_exception_tells_its_code_type_and_whether_to_retry(
    error: AgentException, code: str, error_type: ErrorType, retryable: bool
) -> None:
    """ERR-26, ERR-05: also as a value, in JSON."""
    info = error.to_info(tool_name="add", call_id="c1")
    assert (info.code, info.type, info.retryable) == (code, error_type, retryable)
    assert (info.message, info.tool_name, info.call_id) == ("x", "add", "c1")
    assert ErrorInfo.model_validate(json.loads(json.dumps(info.to_dict()))) == info


@pytest.mark.parametrize("kind", [*(child for child, _ in TREE), *ELSEWHERE])
def test_an_exception_crosses_processes(kind: type[AgentException]) -> None:
    """ERR-20"""
    copy = pickle.loads(pickle.dumps(kind("what to do")))  # noqa: S301 - our own
    assert type(copy) is kind
    assert str(copy) == copy.message == "what to do"
    assert copy.to_info() == kind("what to do").to_info()


def test_extra_facts_of_an_exception_cross_processes_with_it() -> None:
    """ERR-20"""
    limited = errors.RateLimitError("slow down", retry_after=2.5)
    too_long = errors.ContextWindowError("too long", limit=8192)
    failed = errors.RunFailed("no", result=a_result())
    copies = pickle.loads(pickle.dumps((limited, too_long, failed)))  # noqa: S301 - our own
    assert copies[0].retry_after == 2.5
    assert copies[1].limit == 8192
    assert copies[2].result == a_result()


def test_retryable_of_one_exception_leaves_its_class_alone() -> None:
    """ERR-26"""
    assert ModelError("x", retryable=True).retryable
    assert not ModelError.retryable
    assert not ConfigurationError("x").retryable


def test_memory_error_has_its_name_and_star_import_does_not_shadow_pythons() -> None:
    """ERR-20 (DIS-34)"""
    from stepfleet.orchestrator.errors import MemoryError as AgentsOwn  # noqa: PLC0415

    assert AgentsOwn is errors.AgentMemoryError
    names: dict[str, object] = {}
    exec("from stepfleet.orchestrator.errors import *", names)  # noqa: S102 - the subject
    assert "ConfigurationError" in names
    assert not {name for name in names if hasattr(builtins, name)} - {"__builtins__"}


def test_all_lists_every_exception_that_is_public() -> None:
    """QUAL-06"""
    public = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, AgentException)
    }
    assert public - {"MemoryError"} == set(errors.__all__)
