import json
from pathlib import Path

import pytest

from stepfleet.orchestrator.cli.live import doctor

AGENTS = """
from stepfleet.orchestrator import Agent, ModelSettings

wrong = Agent("wrong", model="openai:m", settings=ModelSettings(base_url="localhost:8000"))
keyless = Agent("keyless", model="openai:m", settings=ModelSettings(api_key_env="KEY_OF_NOBODY"))
"""


def test_a_wrong_address_of_one_agent_hides_no_problem_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("STEPFLEET_REDIS_URL", "OPENAI_BASE_URL", "KEY_OF_NOBODY"):
        monkeypatch.delenv(name, raising=False)
    module = tmp_path / "two_agents.py"
    module.write_text(AGENTS)

    assert doctor(str(module), json=True, data=tmp_path / "data") == 2

    failed = [one for one in json.loads(capsys.readouterr().out) if one["state"] == "fail"]
    texts = [one["found"] for one in failed if one["check"].startswith("model")]
    assert len(texts) == 2
    assert any("'wrong'" in text and "https://host/v1" in text for text in texts)
    assert any("'keyless'" in text and "KEY_OF_NOBODY" in text for text in texts)


def test_an_address_with_a_secret_fails_and_the_secret_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEPFLEET_REDIS_URL", raising=False)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://me:s3cret@127.0.0.1:9/v1?key=s3cret")
    module = tmp_path / "one_agent.py"
    module.write_text(
        'from stepfleet.orchestrator import Agent\n\nplain = Agent("plain", model="openai:m")\n'
    )

    assert doctor(str(module), json=True, data=tmp_path / "data") == 2

    printed = capsys.readouterr().out
    (about,) = [one for one in json.loads(printed) if one["check"].startswith("model")]
    assert about["state"] == "fail"
    assert "must have no user, password, query" in about["found"]
    assert "s3cret" not in printed
