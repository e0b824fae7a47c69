"""Lines of files, pipes and objects: each read twice, line by line."""

import io
import os
import sys
import threading
from pathlib import Path

import pytest

from stepfleet.orchestrator import Agent, ConfigurationError, Message
from stepfleet.orchestrator.batches.files.openai_format import LINE_LIMIT, RawLine
from stepfleet.orchestrator.batches.files.source import BatchInput, InputFormat, open_input


def test_blank_lines_count_as_lines_and_not_as_rows(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\xef\xbb\xbf{}\r\n\n  \n[1]")
    with open_input(file) as source:
        first = list(source)
        assert first == [RawLine(0, 1, b"{}"), RawLine(1, 4, b"[1]")]
        assert list(source) == first


def test_a_line_above_the_limit_is_one_row_without_data(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"{}\n" + b"x" * (LINE_LIMIT + 10) + b"\n{}\n" + b"y" * LINE_LIMIT)
    with open_input(str(file)) as source:
        lines = list(source)
    assert [(line.row, line.number) for line in lines] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert lines[1].data is None
    assert lines[2].data == b"{}"
    assert len(lines[3].data or b"") == LINE_LIMIT


def test_a_pipe_is_copied_so_that_it_can_be_read_twice(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b'{"input": "a"}\n',))
    writer.start()
    with open_input(pipe) as source:
        writer.join()
        assert [line.data for line in source] == [line.data for line in source] != []


def test_standard_input_is_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"input": "a"}\n')))
    with open_input("-") as source:
        assert [line.data for line in source] == [b'{"input": "a"}']


def test_objects_become_lines_also_text_and_messages() -> None:
    with open_input([{"input": [Message.user("hi")]}, "a question"]) as source:
        assert [line.data for line in source] == [
            b'{"input":[{"role":"user","content":"hi"}]}',
            b'{"input":"a question"}',
        ]


def test_an_object_without_json_form_is_reported_by_its_number() -> None:
    with pytest.raises(ConfigurationError, match="line 2: is not valid JSON data"):
        open_input([{"input": "x"}, {"input": object()}])


def test_a_missing_file_and_a_folder_are_reported_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing\.jsonl: No such file"):
        open_input(tmp_path / "nothing.jsonl")
    with pytest.raises(ConfigurationError, match="Is a directory"):
        open_input(tmp_path)


def test_what_holds_no_lines_is_reported_with_what_to_give() -> None:
    """CONF-04: an agent in the place of the lines."""
    with pytest.raises(ConfigurationError, match=r"'source' is 'Agent'; give a file's path"):
        open_input(Agent("clerk", model="openai:m"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "text"), [("jsonl", b"1\n2\n3\n"), ("json", b"[1,2,3]"), ("csv", b"a\n1\n2\n3\n")]
)
def test_a_file_with_too_many_lines_is_refused_where_reading_comes_to_them(
    kind: InputFormat, text: bytes
) -> None:
    with BatchInput(io.BytesIO(text), "given", kind, most=3) as source:
        assert [line.row for line in source] == [0, 1, 2]
    with BatchInput(io.BytesIO(text), "given", kind, most=2) as source:
        lines = iter(source)
        assert [next(lines).row, next(lines).row] == [0, 1]
        with pytest.raises(ConfigurationError, match="given: has more than 2 lines; split it"):
            next(lines)
