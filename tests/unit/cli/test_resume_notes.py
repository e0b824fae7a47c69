from pathlib import Path
from typing import Any

from stepfleet.orchestrator import Agent
from stepfleet.orchestrator.cli.run.run import Note, Notes, identity


def agents(**fields: Any) -> dict[str, Agent]:
    return {"solver": Agent("solver", model="openai:gpt-4o-mini", **fields)}


def test_the_same_command_has_the_same_identity() -> None:
    assert identity(b"x", None, agents(), Path("out")) == identity(
        b"x", None, agents(), Path("out")
    )


def test_another_input_agent_limit_or_results_file_is_another_command() -> None:
    one = identity(b"x", None, agents(), None)

    assert one != identity(b"y", None, agents(), None)
    assert one != identity(b"x", "solver", agents(), None)
    assert one != identity(b"x", None, agents(max_steps=3), None)
    assert one != identity(b"x", None, agents(), Path("out"))


def test_a_note_is_found_again_with_its_batch(tmp_path: Path) -> None:
    notes = Notes(tmp_path, "abc")
    assert notes.read() is None
    note = notes.begin()
    assert notes.read() == note
    assert not note.batch_id

    notes.submitted(note, "b1")

    assert notes.read() == Note(note.key, "b1")


def test_each_begin_is_a_new_batch(tmp_path: Path) -> None:
    notes = Notes(tmp_path, "abc")

    assert notes.begin().key != notes.begin().key


def test_a_damaged_note_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "abc.json").write_text("{")

    assert Notes(tmp_path, "abc").read() is None
