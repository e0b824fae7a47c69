"""Checkpoints as files: whole or not at all, bounded, and refused where they do not fit."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stepfleet.orchestrator import (
    AgentCheckpoint,
    AgentConfig,
    AgentState,
    CheckpointFolder,
    ConfigurationError,
    LoggedStep,
    Message,
    StepResult,
    load_checkpoint,
    save_checkpoint,
)
from stepfleet.orchestrator.client import checkpoints as files
from stepfleet.orchestrator.client.checkpoints import CheckpointStep
from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.records.state import StateInfo

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def checkpoint(steps: int = 1, run_id: str = "r1") -> AgentCheckpoint:
    return AgentCheckpoint(
        timestamp=NOW,
        run_id=run_id,
        config=AgentConfig(name="plain", model="openai:none"),
        conversation_history=(
            Message.user("hello"),
            *(Message.assistant(f"step {number}") for number in range(steps)),
        ),
        state=AgentState(
            agent_id=run_id, info=StateInfo(id=run_id, started_at=NOW, updated_at=NOW)
        ),
        steps=tuple(
            CheckpointStep(
                given=1 if number == 0 else 0,
                messages=1,
                logged=LoggedStep(result=StepResult(step=number + 1, started_at=NOW)),
            )
            for number in range(steps)
        ),
    )


def test_a_file_is_read_back_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    """CKPT-04"""
    path = save_checkpoint(checkpoint(), tmp_path / "kept.json")
    assert load_checkpoint(path) == checkpoint()
    assert path.stat().st_mode & 0o077 == 0


def test_a_write_that_fails_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_checkpoint(checkpoint(1), tmp_path / "kept.json")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigurationError, match="No space left on device"):
        save_checkpoint(checkpoint(2), path)
    assert load_checkpoint(path) == checkpoint(1)
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_keeps_the_newest_of_each_run(tmp_path: Path) -> None:
    """CKPT-15"""
    folder = CheckpointFolder(tmp_path / "made" / "here", keep=2)
    for steps in (1, 2, 3):
        folder.save(checkpoint(steps))
    folder.save(checkpoint(1, "r2"))
    assert [path.name for path in folder.files("r1")] == ["r1-000002.json", "r1-000003.json"]
    assert len(folder.newest("r1").steps) == 3
    assert len(folder.files("r2")) == 1
    with pytest.raises(ConfigurationError, match="no checkpoint of run r3"):
        folder.newest("r3")
    with pytest.raises(ConfigurationError, match="field 'keep' is 0"):
        CheckpointFolder(tmp_path, keep=0)


@pytest.mark.parametrize(
    "run_id",
    [
        *("../r1", "..", "/etc/r1", "a/b", "*", "r[12]", "r?", ".hidden", "", "r1\n", "a\\b"),
        *("r\x001", "x" * 300, "~"),
    ],
)
def test_a_run_id_that_is_no_part_of_a_files_name_writes_and_removes_nothing(
    tmp_path: Path, run_id: str
) -> None:
    folder = CheckpointFolder(tmp_path / "kept", keep=1)
    kept = folder.save(checkpoint(1))
    beside = save_checkpoint(checkpoint(1), tmp_path / "r1-000001.json")
    for use in (lambda: folder.save(checkpoint(2, run_id)), lambda: folder.files(run_id)):
        with pytest.raises(
            ConfigurationError, match=r"field .run_id. is .* cannot be part of a file"
        ):
            use()
    assert sorted(tmp_path.rglob("*.json")) == sorted([kept, beside])


def test_a_run_whose_id_begins_like_anothers_keeps_its_own_files(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(checkpoint(1, "r1-000002.json-x"))
    longer = folder.save(checkpoint(1, "r1-more"))
    for steps in (1, 2):
        folder.save(checkpoint(steps))
    assert [path.name for path in folder.files("r1")] == ["r1-000002.json"]
    assert folder.files("r1-more") == [longer]


def test_a_checkpoint_above_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CKPT-15"""
    path = save_checkpoint(checkpoint(), tmp_path / "kept.json")
    monkeypatch.setattr(files, "LARGEST", 100)
    with pytest.raises(SerializationError, match="larger than 100 bytes"):
        load_checkpoint(path)
    with pytest.raises(SerializationError, match="100 fit"):
        save_checkpoint(checkpoint(), path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "1.1"}, r"field 'version' of the checkpoint is '1.1'"),
        ({"version": None}, "field 'version'"),
        ({"conversation_history": []}, "'conversation_history' of the checkpoint has 0 entries"),
        ({"given": 2}, "its steps say 4"),
        ({"state": {}}, "this is not a complete checkpoint.*state"),
        ({"colour": 1}, "colour"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_field(change: dict[str, Any], said: str) -> None:
    """SER-24"""
    data = {**checkpoint().to_dict(), **change}
    with pytest.raises(SerializationError, match=said):
        AgentCheckpoint.from_dict(data)


def test_a_file_that_was_cut_off_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    path.write_text(checkpoint().to_json()[:-20])
    with pytest.raises(SerializationError, match="not valid JSON"):
        load_checkpoint(path)
    path.write_text(json.dumps([1]))
    with pytest.raises(SerializationError, match="one JSON object"):
        load_checkpoint(path)
    with pytest.raises(ConfigurationError, match="No such file"):
        load_checkpoint(tmp_path / "missing.json")
