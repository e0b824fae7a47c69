"""`stepfleet archive` as it is typed, beside a keeper that archives: moved, read, brought back."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import orjson
import pytest
from support.archives import long_known
from support.deadlines import wait_until
from support.servers.redis_servers import short_folder
from support.workers.command_line import CommandLine
from support.workers.keeper_process import KeeperProcess

from stepfleet.orchestrator import Agent, Fleet

AGENT = Agent("plain", model="openai:none", instructions="Be brief.")


@pytest.fixture
def stepfleet(redis_url: str, tmp_path: Path) -> Iterator[CommandLine]:
    long_known(redis_url)
    with short_folder() as folder:
        archive = (tmp_path / "archive").as_uri()
        env = {"STEPFLEET_REDIS_URL": redis_url, "STEPFLEET_ARCHIVE_URL": archive}
        commands = CommandLine(folder, **env)
        try:
            yield commands
        finally:
            commands.end()


def ended(fleet: Fleet, many: int) -> list[str]:
    """Return the ids of runs that have ended."""
    runs = [fleet.submit(AGENT, f"question {one}") for one in range(many)]
    for run_id in runs:
        fleet.runs.cancel(run_id)
    return runs


def test_runs_are_moved_by_hand_read_and_brought_back(
    redis_url: str, stepfleet: CommandLine
) -> None:
    """OPS-05: moved now, what is due and what was moved is told, `--restore` brings runs back."""
    with Fleet(redis_url) as fleet:
        runs = ended(fleet, 3)
        open_run = fleet.submit(AGENT, "open")
        assert "nothing was due" in stepfleet("archive").stdout  # by default those of a day ago
        dry = stepfleet("archive", "--older-than", "0", "--dry-run")
        assert dry.stdout == "3 runs would be moved\n"
        assert fleet.archive.state().files == 0
        moved = orjson.loads(stepfleet("archive", "--older-than", "0", "--json").stdout)
        assert (moved["runs"], moved["files"], moved["left"]) == (3, 1, 0)
        state = orjson.loads(stepfleet("archive", "--state", "--json").stdout)
        assert (state["runs"], state["files"], state["due_runs"]) == (3, 1, 0)
        assert state["url"].startswith("file:///")
        assert "question 0" in stepfleet("show", runs[0]).stdout
        refused = stepfleet("send", runs[0], "go on")
        assert f"stepfleet archive --restore {runs[0]}" in refused.stderr
        unknown = stepfleet("archive", "--restore", runs[0], "none", str(uuid4()))
        assert unknown.returncode == 2
        assert "'none'" in unknown.stderr
        assert fleet.archive.restore([open_run]) == 0  # the error came before anything was done
        back = stepfleet("archive", "--restore", runs[0], open_run)
        assert back.stdout == "1 run brought back\n"
        assert "has the message" in stepfleet("send", runs[0], "go on").stdout
        assert "1 file" in stepfleet("archive", "--state").stdout


def test_files_that_are_cut_or_missing_are_named_with_their_runs(
    redis_url: str, stepfleet: CommandLine, tmp_path: Path
) -> None:
    """OPS-05: `--verify` reads every file back, and ends with 1 where runs cannot be read."""
    with Fleet(redis_url) as fleet:
        groups: dict[str, list[str]] = {}
        for _ in range(3):
            runs = ended(fleet, 2)
            assert stepfleet("archive", "--older-than", "0").returncode == 0
            new = {one.name for one in (tmp_path / "archive").glob("*.zst")} - groups.keys()
            groups[new.pop()] = runs
        whole = stepfleet("archive", "--verify")
        assert whole.returncode == 0
        assert "3 files read, all whole: 6 runs" in whole.stdout
        cut, missing, kept = groups
        path = tmp_path / "archive" / cut
        path.write_bytes(path.read_bytes()[:-30])
        (tmp_path / "archive" / missing).unlink()
        found = stepfleet("archive", "--verify")
        assert found.returncode == 1
        for name in (cut, missing):
            assert name in found.stdout
            assert all(run_id in found.stdout for run_id in groups[name])
        assert kept not in found.stdout
        data = orjson.loads(stepfleet("archive", "--verify", "--json").stdout)
        assert (data["files"], data["runs"]) == (3, 2)
        whys = {one["file"]: one["why"] for one in data["damaged"]}
        assert whys[missing] == "it is missing"
        assert "and was written with" in whys[cut]
        named = {one["file"]: one["run_ids"] for one in data["damaged"]}
        assert named == {name: sorted(groups[name]) for name in (cut, missing)}


def test_a_keeper_moves_a_batch_that_is_brought_back_whole(
    redis_url: str, stepfleet: CommandLine, tmp_path: Path
) -> None:
    """OPS-05: a keeper moves what is due; a batch is named by its id, its lines by theirs."""
    with Fleet(redis_url) as fleet:
        rows = [{"id": f"line {one}", "input": "x"} for one in range(3)]
        batch = fleet.submit_batch(rows, AGENT)
        batch.cancel()
        env = {
            "STEPFLEET_ARCHIVE_URL": (tmp_path / "archive").as_uri(),
            "STEPFLEET_ARCHIVE_AFTER": "0",
        }
        keeper = KeeperProcess(tmp_path, redis_url, env=env).start()
        try:
            wait_until(lambda: fleet.archive.state().runs == 3, within=90, what="the archive")
        finally:
            keeper.end()
        assert "archived 3 runs" in keeper.log
        one = stepfleet("archive", "--restore", "line 1", "--batch", batch.id, "--json")
        assert orjson.loads(one.stdout) == {"restored": 1}
        assert stepfleet("archive", "--restore", batch.id).stdout == "2 runs brought back\n"
        assert "nothing to bring back" in stepfleet("archive", "--restore", batch.id).stdout
        assert len(stepfleet("results", batch.id).stdout.splitlines()) == 3


def test_a_batchs_counts_are_shown_while_its_archive_is_away(
    redis_url: str, stepfleet: CommandLine, tmp_path: Path
) -> None:
    """OPS-05: what Redis has is shown; why runs failed is in files that cannot be read now."""
    with Fleet(redis_url) as fleet:
        batch = fleet.submit_batch([{"id": "one", "input": "question"}], AGENT)
        batch.cancel()
        wait_until(lambda: _moves(stepfleet), within=60, what="the batch in the archive")
        (tmp_path / "archive").rename(tmp_path / "away")
        shown = stepfleet("status", batch.id)
    assert "cancelled" in shown.stdout
    assert "why runs failed cannot be read: archive file:///" in shown.stderr
    assert "is its disk mounted?" in shown.stderr


def _moves(stepfleet: CommandLine) -> bool:
    """Move what is due; return whether something is in the archive."""
    stepfleet("archive", "--older-than", "0")
    return bool(orjson.loads(stepfleet("archive", "--state", "--json").stdout)["runs"])


def test_what_makes_no_sense_is_refused_with_its_fix(
    redis_url: str, stepfleet: CommandLine
) -> None:
    for given, said in [
        (("--restore",), "name the runs or batches"),
        (("some-id",), "IDs are for --restore"),
        (("--state", "--verify"), "exclude each other"),
        (("--state", "--older-than", "1d"), "are for moving runs"),
        (("--batch", "b"), "--batch is for lines' ids"),
        (("--older-than", "soon"), "--older-than is 'soon'"),
    ]:
        done = stepfleet("archive", *given)
        assert (done.returncode, said in done.stderr) == (2, True), (given, done.stderr)
    for given in ((), ("--state",), ("--dry-run",)):
        done = stepfleet("archive", *given, STEPFLEET_ARCHIVE_URL="")
        assert done.returncode == 2
        assert "STEPFLEET_ARCHIVE_URL" in done.stderr
    with Fleet(redis_url) as fleet:
        ended(fleet, 1)
    wrong = stepfleet("archive", "--older-than", "0", STEPFLEET_ARCHIVE_URL="gopher://x/y")
    assert wrong.returncode == 2
    assert "fsspec knows no protocol" in wrong.stderr
