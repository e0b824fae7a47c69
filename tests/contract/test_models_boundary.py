"""Only adapters speak a provider's language."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADAPTERS = (
    ROOT / "worker" / "models",
    ROOT / "worker" / "testing",
    ROOT
    / "orchestrator"
    / "batches"
    / "files"
    / "openai_format.py",  # the file format of that provider's batches
    ROOT / "orchestrator" / "models",  # what services differ in
    ROOT
    / "orchestrator"
    / "tools"
    / "schemas"
    / "from_signature.py",  # a word of pydantic's schemas
)
PROVIDER_WORDS = {
    "max_completion_tokens",
    "stream_options",
    "image_url",
    "prompt_tokens_details",
    "completion_tokens_details",
    "context_length_exceeded",
    "insufficient_quota",
    "choices",
    "delta",
    "include_usage",
    "file_data",
    "json_object",
    "stop_sequence",
    "end_turn",
    "tool_use",
    "inferenceConfig",
    "generationConfig",
    "functionResponse",
}


def sources() -> list[Path]:
    files = [*(ROOT / "orchestrator").rglob("*.py"), *(ROOT / "worker").rglob("*.py")]
    return [file for file in files if not any(file.is_relative_to(folder) for folder in ADAPTERS)]


def words(file: Path) -> Iterator[str]:
    """Yield the texts of a file, its attributes and its keyword arguments."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Constant(value=str(text)):
                yield text
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                yield name


def test_provider_words_stay_inside_the_adapters() -> None:
    """MSG-07: no provider's field names in agent code."""
    found = {
        f"{file.relative_to(ROOT)}: {word}"
        for file in sources()
        for word in words(file)
        if word in PROVIDER_WORDS
    }
    assert not found


@pytest.mark.parametrize("word", ["max_completion_tokens", "choices", "delta"])
def test_the_words_are_those_of_the_adapters(word: str) -> None:
    """MSG-07: the list above is of words that are in use."""
    assert any(word in words(file) for file in ADAPTERS[0].rglob("*.py"))
