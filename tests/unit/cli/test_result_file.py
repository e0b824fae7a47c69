import asyncio
import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.deadlines import wait_until

from stepfleet.orchestrator import (
    AgentRunResult,
    ConfigurationError,
    Lifecycle,
    RunStatus,
    StopReason,
)
from stepfleet.orchestrator.cli.result_file import (
    Kind,
    Layout,
    ResultFile,
    check_apart,
    check_results,
    check_writable,
    is_empty,
    replacing,
    to_line,
)
from stepfleet.orchestrator.cli.results import when_there_is_space

FULL, OPENAI = Layout("full"), Layout("openai")


ENDED = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
R1 = "3279d834-4597-5292-b65d-59e0a95115be"
R2 = "28bd622f-2ee0-5044-aaf4-1f5adc5c6f3a"


def result(run_id: str, line_id: str | None = None) -> AgentRunResult:
    return AgentRunResult(
        run_id=run_id,
        line_id=line_id,
        agent_name="solver",
        lifecycle=Lifecycle.COMPLETED,
        stop_reason=StopReason.COMPLETED,
        status=RunStatus.COMPLETED,
        output="42",
        start_time=ENDED,
        end_time=ENDED,
        max_iterations=10,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_a_full_disk_leaves_whole_lines_and_what_waits_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes half of the second line, then nothing, and has room again at the third try."""
    path = tmp_path / "out.jsonl"
    told: list[str] = []
    refusals = iter([False, True, True])
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        refuses = next(refusals, None)
        if refuses is None:
            return write(descriptor, data)
        if refuses:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[: len(data) // 2])

    async def wait(file: ResultFile) -> None:
        await when_there_is_space(partial(asyncio.to_thread, file.add, result(R2)), told.append)

    with ResultFile(path, FULL) as file:
        file.add(result(R1))
        monkeypatch.setattr(os, "write", full)
        asyncio.run(wait(file))

    assert [line["run_id"] for line in lines(path)] == [R1, R2]
    assert [one.partition(";")[0] for one in told] == [
        f"--out {path} cannot be written: No space left on device",
        f"--out {path} cannot be written: No space left on device",
        "",
    ]


def test_a_result_is_a_line_with_the_inputs_own_id(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path, FULL) as file:
        file.add(result("r1", "q-7"))

    (line,) = lines(path)
    assert (line["id"], line["run_id"], line["output"]) == ("q-7", "r1", "42")
    assert line["status"] == "completed"


def test_openai_batches_are_answered_in_their_own_format(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path, OPENAI) as file:
        file.add(result("r1", "q-7"))

    (line,) = lines(path)
    assert line["custom_id"] == "q-7"
    assert line["response"]["body"]["choices"][0]["message"]["content"] == "42"


@pytest.mark.parametrize("kind", ["full", "slim", "openai"])
def test_what_is_there_already_is_kept_and_not_written_again(tmp_path: Path, kind: Kind) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path, Layout(kind)) as file:
        file.add(result(R1, "a"))
        file.add(result(R1, "a"))
    before = path.read_bytes()

    with ResultFile(path, Layout(kind)) as file:
        assert len(file.ends) == 1
        file.add(result(R1, "a"))
        file.add(result(R2, "b"))

    assert path.read_bytes().startswith(before)
    assert len(lines(path)) == 2


def test_a_line_cut_off_by_a_crash_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path, FULL) as file:
        file.add(result("r1"))
        file.add(result("r2"))
    path.write_bytes(path.read_bytes()[:-20])

    with ResultFile(path, FULL) as file:
        assert len(file.ends) == 1
        file.add(result("r2"))

    assert [line["run_id"] for line in lines(path)] == ["r1", "r2"]


@pytest.mark.parametrize("kind", ["full", "slim", "openai"])
def test_a_line_may_be_cut_off_anywhere(tmp_path: Path, kind: Kind) -> None:
    """The line's own id has quotes and letters of several bytes."""
    path, whole = tmp_path / "out.jsonl", to_line(result(R1, 'q"\\ü'), Layout(kind))
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with ResultFile(path, Layout(kind)) as file:
            assert len(file.ends) == 0
        assert path.read_bytes() == b""


@pytest.mark.parametrize("kind", ["full", "slim", "openai"])
@pytest.mark.parametrize(
    "text",
    ["dear diary", '{"input": "What is 6 times 7?"}', '{"id":"1","input":"a"}', "[1]", "x,y"],
)
@pytest.mark.parametrize("before", [False, True])
def test_a_last_line_without_its_end_that_is_no_result_is_left_alone(
    tmp_path: Path, kind: Kind, text: str, *, before: bool
) -> None:
    path, layout = tmp_path / "out.jsonl", Layout(kind)
    held = (to_line(result(R1), layout) if before else b"") + text.encode()
    path.write_bytes(held)

    with pytest.raises(ConfigurationError, match=f"line {1 + before} is not a result"):
        ResultFile(path, layout)
    with pytest.raises(ConfigurationError, match=f"line {1 + before} is not a result"):
        check_results(path, [layout])

    assert path.read_bytes() == held


def test_results_of_one_of_the_forms_pass_the_check_of_several(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    check_results(path, [FULL, OPENAI])
    path.write_bytes(to_line(result(R1), OPENAI))
    check_results(path, [FULL, OPENAI])
    with pytest.raises(ConfigurationError, match="not a result of format stepfleet"):
        check_results(path, [FULL])


def test_a_results_file_is_never_the_input_file(tmp_path: Path) -> None:
    source, link = tmp_path / "in.jsonl", tmp_path / "link.jsonl"
    source.write_text('{"input": "a"}')
    link.symlink_to(source)
    check_apart(tmp_path / "out.jsonl", source)
    check_apart(tmp_path / "out.jsonl", Path("-"))
    for out in (source, link):
        with pytest.raises(ConfigurationError, match="is the input file; name another"):
            check_apart(out, source)


def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n")

    with pytest.raises(ConfigurationError, match="line 1 is not a result"):
        ResultFile(path, FULL)

    assert path.read_text() == "dear diary\n"


def test_a_path_that_cannot_be_written_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be written.*folder that exists"):
        check_writable(tmp_path / "nowhere" / "out.jsonl")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        check_writable(tmp_path)


def test_checking_leaves_no_file_behind(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"

    check_writable(path)

    assert is_empty(path)
    assert not path.exists()


def test_a_replacement_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")

    with replacing(path) as fresh:
        fresh.write(to_line(result("r1"), FULL))
        assert path.read_text() == "old\n"

    assert lines(path)[0]["run_id"] == "r1"
    assert [one.name for one in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_replacement_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")

    with contextlib.suppress(RuntimeError), replacing(path) as fresh:
        fresh.write(to_line(result("r1"), FULL))
        raise RuntimeError

    assert path.read_text() == "old\n"
    assert [one.name for one in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.fixture
def _open_to_all() -> Iterator[None]:
    """Files are made for everybody where nothing else is said."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_open_to_all")
def test_a_file_that_is_made_is_its_owners_alone(tmp_path: Path) -> None:
    with ResultFile(tmp_path / "grows.jsonl", FULL) as file:
        file.add(result("r1"))
    assert mode(tmp_path / "grows.jsonl") == 0o600
    with replacing(tmp_path / "whole.jsonl") as fresh:
        fresh.write(to_line(result("r1"), FULL))
        assert [mode(path) for path in tmp_path.glob(".whole*")] == [0o600]
    assert mode(tmp_path / "whole.jsonl") == 0o600


@pytest.mark.usefixtures("_open_to_all")
@pytest.mark.parametrize("given", [0o640, 0o600, 0o666])
def test_a_file_that_was_there_keeps_its_mode(tmp_path: Path, given: int) -> None:
    path = tmp_path / "out.jsonl"
    path.touch()
    path.chmod(given)
    with ResultFile(path, FULL) as file:
        file.add(result("r1"))
    assert mode(path) == given
    with replacing(path) as fresh:
        fresh.write(to_line(result("r1"), FULL))
    assert mode(path) == given


def test_a_link_beside_the_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)  # it is made behind the removal
    (tmp_path / f".out.jsonl.{os.getpid()}.new").symlink_to(tmp_path / "other")
    with pytest.raises(ConfigurationError, match="cannot be written: File exists"):
        replacing(tmp_path / "out.jsonl").__enter__()
    assert not (tmp_path / "other").exists()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_device_without_end_is_never_read_to_go_on_from() -> None:
    """A full disk's device gives zeros for ever to whoever reads it."""
    path = Path("/dev/full")
    check_writable(path)
    assert is_empty(path)

    with ResultFile(path, FULL) as file:
        assert len(file.ends) == 0
        with pytest.raises(ConfigurationError, match="No space left"):
            file.add(result("r1"))


def test_a_pipe_gets_the_lines_and_no_end_before_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    seen: list[bytes] = []
    reader = threading.Thread(target=lambda: seen.append(path.read_bytes()))
    reader.start()
    check_writable(path)

    with opened(path) as file:
        file.add(result("r1"))
        file.add(result("r2"))

    reader.join(timeout=60)
    (text,) = seen
    assert [orjson.loads(line)["run_id"] for line in text.splitlines()] == ["r1", "r2"]
    assert stat.S_ISFIFO(path.stat().st_mode)


def opened(path: Path) -> ResultFile:
    """Open a pipe as soon as its reader is there."""

    def attempt() -> ResultFile | None:
        with contextlib.suppress(ConfigurationError):
            return ResultFile(path, FULL)
        return None

    found = wait_until(attempt, within=60)
    assert found is not None
    return found


def test_a_pipe_that_nobody_reads_is_reported_and_nobody_waits(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    with pytest.raises(ConfigurationError, match="start its reader first"):
        ResultFile(path, FULL)


def test_results_for_a_device_do_not_replace_the_device(tmp_path: Path) -> None:
    link = tmp_path / "null"
    link.symlink_to("/dev/null")

    with replacing(link) as sink:
        sink.write(to_line(result("r1"), FULL))

    assert link.is_symlink()
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert [one.name for one in tmp_path.iterdir()] == ["null"]


def test_a_replacement_of_a_linked_file_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "out.jsonl"
    target.write_text("old\n")
    link = tmp_path / "out.jsonl"
    link.symlink_to(target)

    with replacing(link) as sink:
        sink.write(to_line(result("r1"), FULL))

    assert link.is_symlink()
    assert lines(target)[0]["run_id"] == "r1"
