import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepfleet.orchestrator import Agent, ConfigurationError
from stepfleet.orchestrator.cli.notes import (
    Note,
    RunNotes,
    held,
    identity,
    is_held,
    new_key,
    only_writer,
)


def agents(**fields: Any) -> dict[str, Agent]:
    return {"solver": Agent("solver", model="openai:gpt-4o-mini", **fields)}


def test_the_same_file_and_agents_are_the_same_command() -> None:
    assert identity(b"x", None, agents()) == identity(b"x", None, agents())


def test_another_input_agent_limit_or_simulated_provider_is_another_command() -> None:
    one = identity(b"x", None, agents())

    assert one != identity(b"y", None, agents())
    assert one != identity(b"x", "solver", agents())
    assert one != identity(b"x", None, agents(max_steps=3))
    assert one != identity(b"x", None, agents(), "rules.py:rules")


def test_a_note_is_found_again_by_its_command_and_by_its_batch(tmp_path: Path) -> None:
    notes = RunNotes(tmp_path)
    assert notes.read("abc") is None
    note = Note(new_key(), "/out.jsonl", "stepfleet run")

    notes.write(note, "abc")

    assert notes.read("abc") == note
    assert notes.read(note.batch_id) == note


def test_each_key_is_a_new_batch() -> None:
    assert Note(new_key()).batch_id != Note(new_key()).batch_id


@pytest.mark.parametrize("text", ["{", "[]", '{"other": 1}', "3"])
def test_a_damaged_note_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "abc.json").write_text(text)

    assert RunNotes(tmp_path).read("abc") is None


HOLDER = """\
import sys
from pathlib import Path
from stepfleet.orchestrator.cli.notes import held
with held(Path(sys.argv[1]), str):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_names_its_holder_and_ends_with_it_also_by_sigkill(tmp_path: Path) -> None:
    lock = tmp_path / "one.lock"
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        assert is_held(lock)
        with (
            pytest.raises(ConfigurationError, match=f"process {holder.pid} has it"),
            held(lock, lambda who: f"{who} has it"),
        ):
            pass
        holder.kill()
        holder.wait()

    assert not is_held(lock)
    with held(lock, str):
        assert is_held(lock)
    assert not lock.exists()


def test_a_results_file_has_one_writer_at_a_time_whatever_it_is_called(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.touch()
    link = tmp_path / "link.jsonl"
    link.symlink_to(out)

    with (
        only_writer(out),
        pytest.raises(ConfigurationError, match=r"link.jsonl: process .* is writing it"),
        only_writer(link),
    ):
        pass
    with only_writer(link), only_writer(tmp_path / "other.jsonl"):
        pass
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link.jsonl", "out.jsonl"]


def test_a_device_and_no_file_at_all_need_no_lock() -> None:
    for out in (None, Path("/dev/null")):
        with only_writer(out), only_writer(out):
            assert not Path("/dev/.null.lock").exists()


def test_a_lock_is_not_taken_through_somebody_elses_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    (tmp_path / ".out.jsonl.lock").symlink_to(precious)

    with (
        pytest.raises(ConfigurationError, match="cannot be taken"),
        only_writer(tmp_path / "out.jsonl"),
    ):
        pass
    assert precious.read_text() == "data"
