import logging
import os
from pathlib import Path

import pytest
import tiktoken

from stepfleet.orchestrator import Message, ToolCall
from stepfleet.orchestrator.memory.pruning import OVERHEAD, estimate_tokens, text_tokens
from stepfleet.orchestrator.memory.tokens import LONGEST_COUNTED, TokenCounters

ENGLISH = (
    "The committee met on Tuesday to discuss the new timetable. After two hours of debate, most "
    "members agreed that the buses should run every ten minutes in the morning and every twenty "
    "minutes in the evening, provided that the drivers' union accepts the longer breaks."
)
GERMAN = (
    "Der Ausschuss hat sich am Dienstag getroffen, um \u00fcber den neuen Fahrplan zu sprechen. "
    "Nach zwei Stunden waren sich die meisten Mitglieder einig, dass die Busse morgens alle zehn "
    "Minuten und abends alle zwanzig Minuten fahren sollen."
)
JSON = (
    '{"city": "Lisbon", "days": [{"date": "2026-03-01", "low": 11.5, "high": 18.2, '
    '"rain": false}, {"date": "2026-03-02", "low": 12.0, "high": 19.4, "rain": true}], '
    '"source": "station 42"}'
)
PYTHON = (
    "def moving_average(values, width):\n    total = sum(values[:width])\n    yield total / width\n"
    "    for new, old in zip(values[width:], values):\n        total += new - old\n"
    "        yield total / width\n"
)
RUSSIAN = (
    "\u041a\u043e\u043c\u0438\u0442\u0435\u0442 \u0441\u043e\u0431\u0440\u0430\u043b\u0441\u044f "
    "\u0432\u043e \u0432\u0442\u043e\u0440\u043d\u0438\u043a, \u0447\u0442\u043e\u0431\u044b "
    "\u043e\u0431\u0441\u0443\u0434\u0438\u0442\u044c \u043d\u043e\u0432\u043e\u0435 "
    "\u0440\u0430\u0441\u043f\u0438\u0441\u0430\u043d\u0438\u0435 "
    "\u0430\u0432\u0442\u043e\u0431\u0443\u0441\u043e\u0432."
)
CHINESE = (
    "\u59d4\u5458\u4f1a\u661f\u671f\u4e8c\u5f00\u4f1a\u8ba8\u8bba\u65b0\u7684\u516c\u4ea4\u65f6"
    "\u523b\u8868\uff0c\u5927\u591a\u6570\u6210\u5458\u540c\u610f\u65e9\u6668\u6bcf\u5341\u5206"
    "\u949f\u53d1\u4e00\u73ed\u8f66\u3002"
)
# What the encodings o200k_base and cl100k_base count.
COUNTED = [
    (ENGLISH, 50, 50),
    (GERMAN, 48, 59),
    (JSON, 82, 83),
    (PYTHON, 47, 47),
    (RUSSIAN, 19, 30),
    (CHINESE, 26, 41),
]


@pytest.fixture
def encoding() -> tiktoken.Encoding:
    """Return a small encoding of tiktoken's own kind: bytes, and a few pairs."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256, b"cd": 257}
    return tiktoken.Encoding("small", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={})


@pytest.mark.parametrize(
    ("text", "newer", "older"), COUNTED, ids=["en", "de", "json", "py", "ru", "zh"]
)
def test_the_estimate_is_near_what_openais_encodings_count(
    text: str, newer: int, older: int
) -> None:
    """LLM-14"""
    middle = (newer + older) / 2
    assert 0.7 * middle <= text_tokens(text) <= 1.4 * middle


def test_calls_and_pictures_count() -> None:
    """LLM-14"""
    call = ToolCall(id="1", name="look", arguments={"at": "x" * 100})
    assert estimate_tokens(Message.assistant("", (call,))) > 20
    picture = [{"type": "image", "data": "A" * 100_000}, {"type": "text", "text": "x" * 40}]
    assert estimate_tokens(Message.user(picture)) == 1000 + 8 + OVERHEAD


def test_models_of_other_providers_are_estimated() -> None:
    """LLM-14"""
    counters = TokenCounters()
    assert counters.of("custom:Script") is estimate_tokens
    assert counters.of("other:gpt-4o") is estimate_tokens


def test_openais_models_are_counted_by_tiktoken(
    encoding: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLM-14: the text by its encoding, what is special in it as plain text."""
    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda _: encoding)
    count = TokenCounters().ready("openai:gpt-4o", timeout=60)
    assert count(Message.user("abcd ab")) == OVERHEAD + 4
    call = ToolCall(id="1", name="ab", arguments={})
    assert count(Message.assistant("", (call,))) == OVERHEAD + 1 + len("{}")
    assert count(Message.user("<|endoftext|>")) > OVERHEAD + 5


def test_a_text_that_was_counted_is_not_encoded_again(
    encoding: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLM-14"""
    encoded: list[str] = []

    class Watched:
        def encode_ordinary(self, text: str) -> list[int]:
            encoded.append(text)
            return encoding.encode_ordinary(text)

    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda _: Watched())
    count = TokenCounters().ready("openai:gpt-4o", timeout=60)
    assert count(Message.user("abcd")) == count(Message.assistant("abcd")) == OVERHEAD + 2
    assert encoded == ["abcd"]
    count(Message.user("a" * (LONGEST_COUNTED + 1)))
    assert encoded == ["abcd"]


def test_without_its_encoding_a_model_is_estimated_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """LLM-14: the download goes through a proxy that is not there."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delitem(os.environ, "NO_PROXY", raising=False)
    tiktoken.registry.ENCODINGS.pop("o200k_base", None)
    counters = TokenCounters()
    with caplog.at_level(logging.WARNING):
        assert counters.ready("openai:gpt-4o", timeout=60) is estimate_tokens
        assert counters.ready("openai:gpt-4o", timeout=60) is estimate_tokens
    assert [record.message[:30] for record in caplog.records] == ["tokens of gpt-4o are estimated"]


def test_a_model_that_openai_does_not_have_is_estimated() -> None:
    """LLM-14: servers of others speak the same protocol."""
    counters = TokenCounters()
    assert counters.ready("openai:qwen-unknown-7b", timeout=60) is estimate_tokens
