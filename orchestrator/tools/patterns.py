"""Regular expressions of schemas, matched in time linear in the text.

Who writes a schema, or an answer, may be a stranger: Python's own engine takes exponential time
on some patterns. Pydantic's is used instead, which has neither look-around nor back-references.
"""

from functools import lru_cache

from pydantic_core import SchemaError, SchemaValidator, core_schema

from stepfleet.orchestrator.errors import ConfigurationError


def matches(pattern: str, text: str) -> bool:
    """Return whether `pattern` is found in `text`. Raises `ConfigurationError` as `compiled`."""
    return compiled(pattern).isinstance_python(text)


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> SchemaValidator:
    """Return what matches `pattern`.

    Raises `ConfigurationError` for one that is wrong, too large, or needs backtracking.
    """
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern))
    except SchemaError as error:
        why = str(error).strip().splitlines()[-1].removeprefix("error: ")
        raise ConfigurationError(
            f"pattern {pattern[:100]!r} cannot be used: {why}; write it without look-around and "
            "back-references"
        ) from None
