"""Tables and sections of pages say what the code, the settings and the requirements say."""

import json
import re
import subprocess
import sys

from support.documents.documents import ROOT, first_code, head_of, pages, table
from support.documents.requirements_table import named_in, requirements

from stepfleet.orchestrator import ErrorPolicy, ModelErrorCode, ModelSettings, Settings, StopReason
from stepfleet.orchestrator.agents.strategies.built_in import BUILT_IN
from stepfleet.orchestrator.dashboard.api.routes import PREFIX, document
from stepfleet.orchestrator.protocol.verdict import Move
from stepfleet.orchestrator.records.errors import PERMANENT
from stepfleet.orchestrator.records.run.results import end_state, run_status
from stepfleet.worker.models.http_model import RESPONSE_LIMIT
from stepfleet.worker.toolbox.execution import DEFAULT_TIMEOUT

TEXTS = pages()


def page(name: str) -> str:
    return TEXTS[f"docs/{name}"]


def test_the_four_sections_of_troubleshooting_are_there() -> None:
    """DOC-01"""
    heads = re.findall(r"^## (.+)$", page("troubleshooting.md"), re.MULTILINE)
    assert {
        "Why did it stop after one step?",
        "Debugging continuation",
        "Configuring error policies",
        "Time, pauses and resumes",
    } <= set(heads)


def test_every_stop_reason_is_reported_with_its_status_and_state() -> None:
    """DOC-01, RUN-03"""
    told = [[first_code(one) for one in cells[:3]] for cells in stop_reasons()]
    assert told == [[one, run_status(one).value, end_state(one).value] for one in ORDER]
    assert set(ORDER) == set(StopReason)


ORDER = (
    *(StopReason.COMPLETED, StopReason.FINISH_REASON, StopReason.STEPS_LIMIT),
    *(StopReason.TOKEN_LIMIT, StopReason.TIME_LIMIT, StopReason.RETRY_LIMIT),
    *(StopReason.ERROR, StopReason.GUARD, StopReason.USER_REQUESTED),
)


def stop_reasons() -> list[list[str]]:
    return table(page("troubleshooting.md"), "stop reason", "status")


def test_the_presets_of_error_policies_are_those_of_the_code() -> None:
    """DOC-01, ERR-08"""
    head = head_of(page("troubleshooting.md"), "preset")
    for cells in table(page("troubleshooting.md"), "preset"):
        policy = getattr(ErrorPolicy, first_code(cells[0]).removesuffix("()"))()
        assert [str(getattr(policy, field)) for field in head[1:]] == cells[1:]


def test_the_moves_of_a_step_are_those_of_the_code() -> None:
    """DOC-03"""
    told = {first_code(cells[0]) for cells in table(page("internals/loop.md"), "move", "when")}
    assert told == {one.value for one in Move}


def test_the_files_that_the_loop_names_are_there() -> None:
    """DOC-03"""
    for cells in table(page("internals/loop.md"), "moment", "what happens"):
        path = first_code(cells[2])
        assert any((ROOT / base / path).exists() for base in ("", "orchestrator")), path


def test_the_strategies_to_choose_from_are_those_that_exist() -> None:
    """DOC-09: the selection table, their modes, and what they keep."""
    chosen = table(page("strategies.md"), "you have", "take")
    assert len(chosen) >= 8
    told = table(page("strategies.md"), "strategy", "modes, the default first")
    names = {name: cells for cells in told for name in re.findall(r"`(\w+)`", cells[0])}
    assert names.keys() == BUILT_IN.keys()
    for name, cells in names.items():
        modes = re.findall(r"`(\w+)`", cells[1])
        assert modes[0] == BUILT_IN[name].default_mode
        assert set(modes) == BUILT_IN[name].modes


def test_the_costs_page_has_caching_and_the_format_of_prices() -> None:
    """DOC-09"""
    heads = re.findall(r"^## (.+)$", page("costs.md"), re.MULTILINE)
    assert {"Pricing files", "Caching, and what it trades"} <= set(heads)


def test_the_glossary_has_its_words_in_order() -> None:
    """DOC-08"""
    words = [cells[0].strip("`") for cells in table(page("glossary.md"), "word", "means")]
    named = {"ErrorSink", "HandlerOutcome", "SchemaHandle", "AgentMemory", "RunResult"}
    assert named <= set(words)
    assert words == sorted(words, key=lambda word: word.replace(" ", "").lower())


def test_the_decisions_and_the_traps_are_all_there() -> None:
    """DOC-07: a matrix row per disagreement, and each trap with requirements that exist."""
    matrix = table(page("internals/decisions.md"), "#", "subject")
    assert [cells[0] for cells in matrix] == [f"DIS-{number:02}" for number in range(1, 36)]
    traps = table(page("internals/decisions.md"), "trap", "what happens")
    ids = {one.id for one in requirements()}
    assert len(traps) == 20
    for cells in traps:
        assert set(cells[2].split(", ")) <= ids


def test_what_the_roadmap_calls_open_is_open_and_the_four_phases_are_there() -> None:
    """DOC-06"""
    tested = named_in()
    held = {row.id for row in requirements() if row.id in tested and not row.why_open}
    roadmap = page("internals/decisions.md").partition("\n## Roadmap\n")[2]
    phases = table(roadmap, "phase", "item")
    assert {cells[0] for cells in phases} == {"1", "2", "3", "4"}
    assert all(cells[2].startswith(("done", "open", "measured")) for cells in phases)
    named = set(re.findall(r"\b[A-Z]{2,6}-\d\d\b", roadmap))
    assert named & held == set(), "tests hold these now: say so in docs/internals/decisions.md"
    assert named <= {one.id for one in requirements()}


# ---------------------------------------------------------------------------------- operations

APP = """\
import json
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.app import create_app

conf = create_app(load_settings(redis_url="redis://127.0.0.1:9/0")).conf
names = (
    "worker_pool", "worker_concurrency", "task_acks_late", "accept_content", "task_serializer",
    "result_backend", "task_ignore_result", "task_default_queue", "worker_prefetch_multiplier",
    "worker_send_task_events", "broker_connection_retry_on_startup",
)
told = {name: conf[name] for name in names}
told["visibility_timeout"] = conf.broker_transport_options["visibility_timeout"]
print(json.dumps(told))
"""


def test_celerys_settings_are_reported_as_they_are() -> None:
    """DOC-10, DIST-07"""
    done = subprocess.run(
        [sys.executable, "-c", APP], capture_output=True, text=True, timeout=60, check=True
    )
    conf = json.loads(done.stdout)
    defaults = Settings.model_fields
    told: dict[str, str] = {}
    for cells in table(page("operations.md"), "Celery setting", "value"):
        values = re.split(r", (?![^\[]*\])", cells[1])
        names = re.findall(r"`(\w+)`", cells[0])
        told.update(zip(names, values, strict=True))
    assert told.keys() == conf.keys()
    for name, text in told.items():
        bare = text.strip("`")
        value = defaults[bare].default if bare in defaults else bare
        words = {True: "on", False: "off", None: "none"}
        expected = conf[name]
        if isinstance(expected, list):
            assert json.loads(bare) == expected
        elif isinstance(expected, bool | None):
            assert bare == words[expected], name
        else:
            assert str(value) == str(expected), name


def test_what_operators_turn_are_settings_and_their_defaults_are_reported_in_one_place() -> None:
    """DOC-10"""
    section = page("operations.md").partition("## Settings\n")[2].partition("\n## ")[0]
    names = set(re.findall(r"`(\w+)`", section))
    assert len(names) >= 8
    assert names <= Settings.model_fields.keys()
    assert "configuration.md#settings-of-the-fleet" in section


def test_the_sections_of_operations_are_there() -> None:
    """DOC-10"""
    heads = re.findall(r"^##+ (.+)$", page("operations.md"), re.MULTILINE)
    assert {"Celery", "Scaling", "Worker limits", "Recovery"} <= set(heads)
    assert "**Visibility timeout.**" in page("operations.md")


def test_the_limits_of_workers_are_reported_as_they_are() -> None:
    """DOC-10"""
    told = {cells[1]: cells[2] for cells in table(page("operations.md"), "what is limited", "by")}
    settings = Settings.model_fields
    assert told["`slots`, `--slots`"] == str(settings["slots"].default)
    for name in ("tool_threads", "connections", "poison_limit"):
        assert told[f"`{name}`"] == str(settings[name].default)
    assert told["the agent's `settings.timeout`"] == f"{ModelSettings().timeout:g} s"
    assert told["its `timeout`"] == f"{DEFAULT_TIMEOUT:g} s"
    assert told["`RESPONSE_LIMIT` of the adapter"] == f"{RESPONSE_LIMIT // 2**20} MiB"


def test_the_codes_of_model_errors_are_those_of_the_code() -> None:
    """DOC-01, LLM-06"""
    told = {
        first_code(cells[0]): cells[2].startswith("yes")
        for cells in table(page("troubleshooting.md"), "code")
    }
    assert told == {code.value: code in PERMANENT for code in ModelErrorCode}


def test_every_address_of_the_api_is_on_the_page_of_flower() -> None:
    rows = " ".join(cells[0] for cells in table(page("flower.md"), "address", "answer"))
    told = {re.sub("ID|NAME", "{id}", one) for one in re.findall("`([A-Z]+ /[^`]+)`", rows)}
    paths = {path.removeprefix(PREFIX): verbs for path, verbs in document()["paths"].items()}
    assert {one.replace("ACTION", "{action}") for one in told} == {
        f"{verb.upper()} {path}" for path, verbs in paths.items() for verb in verbs
    }
