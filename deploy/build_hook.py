"""Writes the commit into wheels and source archives, for `stepfleet --version` and `doctor`.

From the environment's `STEPFLEET_COMMIT` (an image's build has no .git), else the checkout's. A
wheel of a source archive has that of the archive. Without any of them nothing is written.
"""

import os
import runpy
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "deploy/package/stepfleet"


class CommitHook(BuildHookInterface[Any]):
    """The hook that hatchling finds here. Raises `ValueError` for a variable that is no commit."""

    _folder = ""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the commit to what is built; an editable install reads its checkout's."""
        package = Path(self.root) / PACKAGE
        ours = runpy.run_path(str(package / "orchestrator" / "version.py"))
        name, commit = ours["COMMIT_FILE"], os.environ.get("STEPFLEET_COMMIT", "")
        if commit and not ours["_COMMIT"].fullmatch(commit):
            msg = f"STEPFLEET_COMMIT={commit!r} is not a whole commit: pass $(git rev-parse HEAD)"
            raise ValueError(msg)
        commit = commit or ours["checked_out"](Path(self.root))
        if version == "editable" or not commit or (package / name).exists():
            return
        self._folder = tempfile.mkdtemp()
        (file := Path(self._folder) / name).write_text(f"{commit}\n", encoding="ascii")
        inside = "stepfleet" if self.target_name == "wheel" else PACKAGE
        build_data["force_include"][str(file)] = f"{inside}/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the file from which it was taken."""
        del version, build_data, artifact_path
        if self._folder:
            shutil.rmtree(self._folder)
