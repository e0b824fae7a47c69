"""The build that runs: the commit of clones, worktrees and archives, as git itself tells it."""

import subprocess
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from stepfleet.orchestrator.version import COMMIT_FILE, Build, checked_out, commit_of, own_build

ROOT = Path(__file__).resolve().parents[3]
Git = Callable[..., str]
GIVEN = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def git(tmp_path: Path) -> Git:
    def run(*arguments: str, at: str = "clone") -> str:
        command = ("git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments)
        done = subprocess.run(
            command, cwd=tmp_path / at, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.strip()

    (tmp_path / "clone").mkdir()
    run("init", "--quiet", "--initial-branch", "a/branch")
    run("commit", "--quiet", "--allow-empty", "-m", "one")
    return run


def test_the_commit_of_a_branch_is_found_also_when_its_refs_are_packed(
    git: Git, tmp_path: Path
) -> None:
    """OPS-04"""
    assert checked_out(tmp_path / "clone") == git("rev-parse", "HEAD")
    git("pack-refs", "--all")
    assert not (tmp_path / "clone/.git/refs/heads/a/branch").exists()
    assert checked_out(tmp_path / "clone") == git("rev-parse", "HEAD")
    git("commit", "--quiet", "--allow-empty", "-m", "two")
    assert checked_out(tmp_path / "clone") == git("rev-parse", "HEAD")


def test_the_commit_of_a_worktree_is_its_own(git: Git, tmp_path: Path) -> None:
    """OPS-04: on a branch whose refs are packed, and detached."""
    git("worktree", "add", "--quiet", "-b", "other", "../tree")
    git("commit", "--quiet", "--allow-empty", "-m", "two", at="tree")
    two = git("rev-parse", "HEAD", at="tree")
    assert checked_out(tmp_path / "tree") == two != checked_out(tmp_path / "clone")
    git("pack-refs", "--all")
    assert checked_out(tmp_path / "tree") == two != checked_out(tmp_path / "clone")
    git("checkout", "--quiet", "--detach", two)
    assert checked_out(tmp_path / "clone") == two


def test_what_is_no_checkout_has_no_commit(tmp_path: Path, git: Git) -> None:
    """OPS-04: nor one below a checkout of somebody else."""
    (tmp_path / "clone/site-packages").mkdir()
    assert commit_of(tmp_path / "clone/site-packages") == ""
    git("checkout", "--quiet", "--orphan", "empty")
    assert checked_out(tmp_path / "clone") == ""


def test_a_builds_own_commit_comes_before_that_of_a_checkout(git: Git, tmp_path: Path) -> None:
    """OPS-04: and text that is no commit is none."""
    file = tmp_path / "clone" / COMMIT_FILE
    file.write_text(f"{GIVEN}\n")
    assert commit_of(tmp_path / "clone") == GIVEN
    file.write_text("$Format:%H$")
    assert commit_of(tmp_path / "clone") == git("rev-parse", "HEAD")


def test_a_build_is_shown_with_what_is_known_of_it() -> None:
    assert str(Build("0.1.0", GIVEN)) == "0.1.0+01234567"
    assert str(Build("0.1.0")) == "0.1.0"
    assert str(Build()) == ""


def test_this_build_is_that_of_the_installed_package_and_of_this_checkout() -> None:
    """OPS-04"""
    assert own_build() == Build(version("stepfleet"), checked_out(ROOT))


def test_archives_have_the_commit_and_an_unknown_one_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-04: a wheel of a source archive has that of the archive."""
    monkeypatch.setenv("STEPFLEET_COMMIT", GIVEN)
    archive = next(SdistBuilder(str(ROOT)).build(directory=str(tmp_path)))
    monkeypatch.delenv("STEPFLEET_COMMIT")
    subprocess.run(["tar", "-xf", archive, "-C", str(tmp_path)], check=True, timeout=60)
    (unpacked,) = (one for one in tmp_path.iterdir() if one.is_dir())
    monkeypatch.setenv("STEPFLEET_COMMIT", "f" * 40)
    assert committed(unpacked, tmp_path / "of-the-archive") == GIVEN
    monkeypatch.delenv("STEPFLEET_COMMIT")
    (unpacked / "deploy/package/stepfleet" / COMMIT_FILE).unlink()
    assert committed(unpacked, tmp_path / "unknown") == ""
    monkeypatch.setenv("STEPFLEET_COMMIT", "main")
    with pytest.raises(ValueError, match="not a whole commit"):
        committed(unpacked, tmp_path / "refused")


def committed(root: Path, folder: Path) -> str:
    """Build a wheel of `root`, and return the commit in it; '' for none."""
    wheel = next(WheelBuilder(str(root)).build(directory=str(folder), versions=["standard"]))
    with zipfile.ZipFile(wheel) as built:
        inside = f"stepfleet/{COMMIT_FILE}"
        return built.read(inside).decode().strip() if inside in built.namelist() else ""
