"""What `from stepfleet import ...` offers, and what it costs."""

import inspect
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from support.documents.public_api import public
from support.loaded_modules import loaded_by

import stepfleet
import stepfleet.compat
import stepfleet.orchestrator
import stepfleet.types


def test_every_public_name_is_there() -> None:
    for name in dir(stepfleet):
        assert getattr(stepfleet, name) is not None
    assert 80 <= len(dir(stepfleet)) <= 100


def test_a_star_import_takes_the_public_names() -> None:
    taken: dict[str, Any] = {}
    exec("from stepfleet import *", taken)  # noqa: S102 - only a module may have a star
    assert sorted(taken.keys() - {"__builtins__"}) == dir(stepfleet)


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'stepfleet' has no attribute 'RunPage'"):
        stepfleet.RunPage  # type: ignore[attr-defined]  # noqa: B018 - it is in stepfleet.types


def test_no_name_is_offered_in_two_places() -> None:
    names = [name.rpartition(".")[2] for name in public()]
    assert len(names) == len(set(names))


def test_programs_that_import_from_the_orchestrator_run_on() -> None:
    there = {name.rpartition(".")[2]: found for name, found in public().items()}
    assert dir(stepfleet.orchestrator) == sorted(there)
    for name, found in there.items():
        assert getattr(stepfleet.orchestrator, name) is found


@pytest.mark.parametrize("package", ["stepfleet", "stepfleet.orchestrator", "stepfleet.worker"])
def test_importing_a_package_imports_nothing_else(package: str) -> None:
    loaded = loaded_by(f"import {package}")
    assert loaded.isdisjoint({"pydantic", "celery", "redis", "httpx"})
    assert 1 <= sum(name.startswith("stepfleet") for name in loaded) <= 3


def test_a_tool_is_defined_without_what_a_fleet_needs() -> None:
    loaded = loaded_by("from stepfleet import tool")
    assert loaded.isdisjoint({"celery", "redis", "stepfleet.orchestrator.client"})


def _types_in(annotation: Any) -> Iterator[Any]:
    yield annotation
    for one in get_args(annotation):
        yield from _types_in(one)


def _returned(cls: type[Any]) -> Iterator[Any]:
    """Yield the types that a class's public methods and properties return."""
    for name, found in inspect.getmembers_static(cls):
        function = inspect.unwrap(getattr(found, "fget", getattr(found, "__func__", found)))
        own = inspect.isfunction(function) and function.__module__.startswith("stepfleet.")
        if own and not name.startswith("_"):
            yield from _types_in(get_type_hints(function).get("return"))


def test_every_type_that_a_public_method_returns_is_public() -> None:
    """QUAL-06"""
    offered = set(public().values())
    returned = {
        one
        for cls in offered
        if isinstance(cls, type) and cls.__module__.startswith("stepfleet.")
        for one in _returned(cls)
        if isinstance(one, type) and one.__module__.startswith("stepfleet.")
    }
    assert {one.__name__ for one in returned - offered} == set()
    assert len(returned) > 30
