"""The recipes on local development run as they stand, without a fleet or a Redis beside them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

PAGES = Path(__file__).parents[3] / "docs" / "how-to"
LONG = 110.0


def sample(page: str) -> tuple[str, str]:
    """Return the name and the text of the page's first file."""
    text = (PAGES / page).read_text(encoding="utf-8")
    found = re.search(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1], found[2]


def ran(folder: Path, model: ModelServer, *command: str) -> str:
    env = {**os.environ, "OPENAI_BASE_URL": model.url, "OPENAI_API_KEY": "sk-test"}
    env.pop("STEPFLEET_REDIS_URL", None)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def seller(request: RequestRecord) -> Reply:
    if request.turn == 1:
        return Reply(tool_calls=(ToolCallReply("price", {"product": "lamp"}),))
    return Reply("40 dollars" if "dollars" in request.messages[0]["content"] else "4000")


@pytest.mark.timeout(300)
def test_a_wrong_answer_is_forked_compared_and_stepped(tmp_path: Path, model: ModelServer) -> None:
    """And commands in the same directory read the runs of the local fleet."""
    model.follow(seller)
    name, text = sample("debug-a-wrong-agent.md")
    (tmp_path / name).write_text(text, encoding="utf-8")
    said = ran(tmp_path, model, name)
    assert said.startswith("4000\n40 dollars\nthey differ from step 2\nstep 1 of run ")
    assert "call:  price(product='lamp')\n    -> {\"cents\": 4000}" in said
    assert "the run ends: completed" in said
    run_id = re.findall(r"step 1 of run ([0-9a-f-]+)", said)[0]
    explained = ran(tmp_path, model, "-m", "stepfleet.orchestrator.cli", "explain", run_id)
    assert "completed" in explained


def onlooker(request: RequestRecord) -> Reply:
    if request.turn == 1:
        return Reply(tool_calls=(ToolCallReply("photo", {"product": "lamp"}),))
    return Reply("No: that one is blue, ours is red.")


def test_images_reach_the_model_from_messages_and_from_tools(
    tmp_path: Path, model: ModelServer
) -> None:
    model.follow(onlooker)
    name, text = sample("images-in-tools.md")
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert ran(tmp_path, model, name) == "No: that one is blue, ours is red.\n"
    asked, _, answered, shown = model.requests[1].messages
    assert [one["type"] for one in asked["content"]] == ["text", "image_url", "file"]
    assert asked["content"][1]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert answered["content"] == "The photo of the lamp follows."
    assert shown["role"] == "user"
    assert [one["type"] for one in shown["content"] if one["type"] != "text"] == ["image_url"]
