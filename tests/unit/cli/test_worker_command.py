import sys
from pathlib import Path

import pytest

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.cli.fleet import DataFolder
from stepfleet.orchestrator.cli.workers import (
    FleetPlan,
    WorkerOptions,
    celery_arguments,
    checked_autoscale,
    simulated_environment,
    supervisor_of,
    watched_argv,
    worker_argv,
    worker_environment,
)
from stepfleet.orchestrator.settings.settings import load_settings

SECRET_URL = "redis://:secret@127.0.0.1:6379/0"


def test_a_worker_is_celerys_own_worker_with_our_app() -> None:
    argv = worker_argv(WorkerOptions("agents.py"))

    assert argv[:3] == [sys.executable, "-m", "stepfleet.worker"]


def test_the_asyncio_pool_is_the_apps_own_choice() -> None:
    assert "--pool" not in celery_arguments(WorkerOptions("agents.py", pool="asyncio"))


def test_another_pool_is_named_to_celery() -> None:
    arguments = celery_arguments(WorkerOptions("agents.py", slots=4, pool="prefork"))

    assert arguments[arguments.index("--pool") + 1] == "prefork"
    assert arguments[arguments.index("--concurrency") + 1] == "4"


def test_the_address_travels_in_the_environment_and_never_as_an_argument() -> None:
    options = WorkerOptions("agents.py", slots=7, name="one")

    assert not any("secret" in argument for argument in worker_argv(options))
    assert worker_environment(options, SECRET_URL, {"PATH": "/bin"}) == {
        "PATH": "/bin",
        "STEPFLEET_REDIS_URL": SECRET_URL,
        "STEPFLEET_AGENTS": "agents.py",
        "STEPFLEET_SLOTS": "7",
    }


def test_slots_that_are_not_given_stay_as_the_settings_say() -> None:
    environment = worker_environment(WorkerOptions("a"), SECRET_URL, {"STEPFLEET_SLOTS": "3"})

    assert environment["STEPFLEET_SLOTS"] == "3"


def test_a_watched_module_gets_its_own_arguments() -> None:
    assert watched_argv("celery", "-A", "app")[-3:] == ["celery", "-A", "app"]


def test_simulated_workers_can_reach_no_real_provider() -> None:
    environment = simulated_environment("http://127.0.0.1:1/v1")

    assert environment["STEPFLEET_ALLOW_MODEL_REQUESTS"] == "0"
    assert environment["OPENAI_BASE_URL"] == "http://127.0.0.1:1/v1"


def test_autoscale_is_passed_on_as_celery_takes_it() -> None:
    options = WorkerOptions("agents.py", autoscale=checked_autoscale(" 50 , 2"))
    assert celery_arguments(options)[-2:] == ["--autoscale", "50,2"]
    assert checked_autoscale("50") == "50,0"
    assert checked_autoscale(None) is None


@pytest.mark.parametrize("given", ["", "many", "2,50", "0,0", "1000000,1", "-5,1", "5,x"])
def test_an_autoscale_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(ConfigurationError, match="--autoscale"):
        checked_autoscale(given)


@pytest.mark.parametrize(("settings", "port"), [({}, "0"), ({"metrics_port": 9500}, None)])
def test_workers_of_a_local_fleet_open_no_port_unless_one_is_asked_for(
    settings: dict[str, int], port: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-06: `run`, `up` and `ask` start them."""
    monkeypatch.delenv("STEPFLEET_METRICS_PORT", raising=False)
    agents = tmp_path / "one_agent.py"
    agents.write_text("from stepfleet import Agent\na = Agent('a', model='openai:m')\n")
    plan = FleetPlan(str(agents), workers=1)
    given = load_settings(redis_url="redis://127.0.0.1:1/0", **settings)
    made = supervisor_of(plan, given, DataFolder(tmp_path), {}, print)
    assert [one.env.get("STEPFLEET_METRICS_PORT") for one in made.workers] == [port]
