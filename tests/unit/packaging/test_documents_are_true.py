"""What pages say of the code, the commands and the settings is so: names, tables, links, drawings."""

import importlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import click
import pytest
import typer
from documents import DOCS, ROOT, Block, blocks_of, pages
from requirements_table import named_in, requirements

import stepfleet.orchestrator as public
from stepfleet.orchestrator import ErrorPolicy, StopReason
from stepfleet.orchestrator.cli.entry import build
from stepfleet.orchestrator.protocol.verdict import Move
from stepfleet.orchestrator.records.results import end_state, run_status
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.settings import Settings
from stepfleet.orchestrator.strategies.naming import BUILT_IN

TEXTS = pages()
MODULES = (
    *("continuation", "errors", "error_policy", "broadcast.port", "answers.sinks"),
    *("protocol.claim", "protocol.verdict", "records.steps", "records.tools", "records.errors"),
    *("schemas.handles", "tools", "tools.builtin", "strategies", "recall", "parsing"),
    *("run_display", "records.state", "memory.protocol"),
)
OLD_NAMES = {"AgentMemory", "HandlerOutcome", "RunResult", "ErrorPresenceCheck", "RetryLimit"}
"""Words of earlier designs, which pages explain."""
SHELLS = {"bash", "console", "sh"}


def page(name: str) -> str:
    return TEXTS[f"docs/{name}"]


def blocks(*languages: str) -> Iterator[tuple[str, Block]]:
    for name, text in TEXTS.items():
        for block in blocks_of(text):
            if block.language in languages:
                yield name, block


def rows(text: str) -> list[list[str]]:
    """Return the cells of all table rows of a page; heads and rules too."""
    return [
        [cell.strip() for cell in line[1:-1].split(" | ")]
        for line in text.splitlines()
        if line.startswith("|") and line.endswith("|")
    ]


def table(text: str, *head: str) -> list[list[str]]:
    """Return the rows below the row that begins with these cells."""
    found = rows(text)
    start = next(number for number, row in enumerate(found) if row[: len(head)] == list(head))
    body = found[start + 2 :]
    width = len(found[start])
    end = next((n for n, row in enumerate(body) if len(row) != width), len(body))
    return body[:end]


def first_code(cell: str) -> str:
    return re.findall(r"`([^`]+)`", cell)[0]


# ------------------------------------------------------------------------------ names and links


def is_known(name: str) -> bool:
    first, *rest = name.split(".")
    for module in ("", *(f".{one}" for one in MODULES)):
        owner = importlib.import_module(f"{public.__name__}{module}")
        found = getattr(owner, first, None)
        if found is None:
            continue
        fields = getattr(found, "model_fields", {})
        return not rest or hasattr(found, rest[0]) or rest[0] in fields
    return False


@pytest.mark.parametrize("name", ["primitives.md", "protocols.md", "loop.md", "glossary.md"])
def test_every_class_that_a_page_names_is_there(name: str) -> None:
    """DOC-03, DOC-08: `CamelCase` and `CamelCase.attribute` resolve in the packages."""
    named = set(re.findall(r"`([A-Z][a-z]+[A-Z]\w*(?:\.\w+)?)(?:\([^`]*\))?`", page(name)))
    named -= {"InlineWorker", "CamelCase"}
    assert named
    assert {one for one in named if not is_known(one)} - OLD_NAMES == set()


def test_the_fields_of_the_values_are_those_of_their_classes() -> None:
    """DOC-03"""
    for cells in table(page("primitives.md"), "value", "is"):
        owner = getattr(public, first_code(cells[0]))
        for field in re.findall(r"`(\w+)`", cells[2]):
            annotated = getattr(owner, "__annotations__", {})
            assert hasattr(owner, field) or field in annotated, (owner, field)


def test_the_methods_of_the_protocols_are_those_of_their_classes() -> None:
    """DOC-03"""
    for cells in table(page("protocols.md"), "protocol", "methods"):
        for method in re.findall(r"`(\w+)`", cells[1]):
            assert is_known(f"{first_code(cells[0])}.{method}"), cells[0]


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_and_every_path_leads_somewhere(name: str) -> None:
    """DOC-03"""
    folder = (ROOT / name).parent
    for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", TEXTS[name]):
        assert (folder / target).exists(), target
    for path in re.findall(
        r"`((?:orchestrator|worker|docs|examples|deploy|tests)/[\w./-]+)`", TEXTS[name]
    ):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", TEXTS)
def test_anchors_in_links_are_headings(name: str) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", TEXTS[name]):
        file = (ROOT / name).parent / target if target else ROOT / name
        heads = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads}
        assert anchor in slugs


def test_the_index_lists_every_page() -> None:
    listed = set(re.findall(r"\]\((\w+\.md)\)", page("README.md")))
    assert listed == {one.name for one in DOCS.glob("*.md")} - {"README.md"}


# ------------------------------------------------------------------------------------- samples


def test_json_and_toml_samples_can_be_read() -> None:
    read = 0
    for name, block in blocks("json"):
        json.loads(block.text)
        read += 1
        assert name
    for _, block in blocks("toml"):
        tomllib.loads(block.text)
        read += 1
    assert read >= 4


def command_lines() -> Iterator[tuple[str, list[str]]]:
    for name, block in blocks(*SHELLS):
        for line in block.text.replace("\\\n", " ").splitlines():
            for part in line.partition(" # ")[0].split("&&"):
                words = part.split()
                if words and words[0].removeprefix(".venv/bin/") == "stepfleet":
                    yield name, words[1:]
    for name, text in TEXTS.items():
        for command in re.findall(r"`stepfleet ([^`]+)`", re.sub(r"```.*?```", "", text)):
            yield name, command.split()


def test_every_command_on_a_page_exists_with_its_options() -> None:
    root = typer.main.get_command(build())
    assert isinstance(root, click.Group)
    seen = 0
    for name, words in command_lines():
        if words[0].startswith("-"):
            continue
        command = root.commands.get(words[0])
        assert command is not None, (name, words)
        options = {opt for one in command.params for opt in (*one.opts, *one.secondary_opts)}
        for word in words[1:]:
            if word.startswith("--"):
                assert word.partition("=")[0] in options, (name, words)
        seen += 1
    assert seen > 30


# ------------------------------------------------------------------------------------ drawings

FLOW = re.compile(
    r"(subgraph \w+ \[[^\]]+\]|end"
    r"|(\w+(\[\(?[^\]]+\)?\]|\{\{[^}]+\}\})?( (-->|-- [^-]+ -->) )?)+)$"
)
SEQUENCE = re.compile(
    r"(participant \w+ as [^;]+|Note over \w+(,\w+)?: [^;#]+|\w+-?->>\w+: [^;#]+)$"
)
STATE = re.compile(r"(\[\*\]|\w+) --> (\[\*\]|\w+)(: [^;:]+)?$")
CLASS = re.compile(
    r"(class \w+ \{|\}|\w+(: \w+)?|\w+ (\*--|o--|<\|--|\.\.>|-->) \w+( : [^:]+)?)$"
)
GRAMMARS = {
    "flowchart LR": FLOW,
    "sequenceDiagram": SEQUENCE,
    "stateDiagram-v2": STATE,
    "classDiagram": CLASS,
}


def test_the_drawings_keep_to_the_grammar_of_their_kind() -> None:
    """DOC-04: architecture, flow, types, states; checked against what of mermaid is used here."""
    kinds = []
    for name, block in blocks("mermaid"):
        kind, *lines = block.text.splitlines()
        kinds.append(kind)
        for line in filter(str.strip, lines):
            assert GRAMMARS[kind].match(line.strip()), f"{name}: {line!r}"
    assert set(kinds) == set(GRAMMARS)


def test_the_types_that_are_drawn_exist_with_their_fields() -> None:
    """DOC-04"""
    (drawn,) = (one.text for _, one in blocks("mermaid") if one.text.startswith("classDiagram"))
    fields = dict(re.findall(r"class (\w+) \{\n(.*?)\}", drawn, re.DOTALL))
    for name, body in fields.items():
        for line in body.split("\n"):
            if field := line.strip().partition(":")[0]:
                assert name == "Agent" or is_known(f"{name}.{field}"), (name, field)
    related = re.findall(r"(\w+) (?:\*--|o--|\.\.>) (\w+)", drawn)
    assert {one for pair in related for one in pair if not is_known(one)} == set()


def test_every_arrow_between_states_is_explained_and_every_state_is_there() -> None:
    """DOC-04"""
    (drawn,) = (one.text for _, one in blocks("mermaid") if one.text.startswith("stateDiagram"))
    arrows = re.findall(r"(\S+) --> (\w+): (.+)", drawn)
    assert {one for _, one, _ in arrows} | {"queued"} == {state.value for state in Lifecycle}
    told = [cells[0] for cells in table(page("guarantees.md"), "arrow", "when")]
    for _, target, label in arrows:
        first = re.split(r"[,:]", label)[0]
        assert label in told or first in told or target in told, label
        for word in label.split(", "):
            assert word in told or first in told or target in told


def test_the_guarantees_name_tests_that_are_there() -> None:
    """DOC-10"""
    source = "\n".join(
        one.read_text(encoding="utf-8") for one in (ROOT / "tests").rglob("test_*.py")
    )
    names = re.findall(r"`(test_\w+)`", page("guarantees.md"))
    assert len(names) > 10
    modules = {one.stem for one in (ROOT / "tests").rglob("test_*.py")}
    assert {one for one in names if f"def {one}(" not in source and one not in modules} == set()


# -------------------------------------------------------------------------------------- tables


def test_the_four_sections_of_troubleshooting_are_there() -> None:
    """DOC-01"""
    heads = re.findall(r"^## (.+)$", page("troubleshooting.md"), re.MULTILINE)
    assert {
        "Why did it stop after one step?",
        "Debugging continuation",
        "Configuring error policies",
        "Time, pauses and resumes",
    } <= set(heads)


def test_every_stop_reason_is_told_with_its_status_and_state() -> None:
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
    (head,) = [row for row in rows(page("troubleshooting.md")) if row[0] == "preset"]
    for cells in table(page("troubleshooting.md"), "preset"):
        policy = getattr(ErrorPolicy, first_code(cells[0]).removesuffix("()"))()
        assert [str(getattr(policy, field)) for field in head[1:]] == cells[1:]


def test_the_moves_of_a_step_are_those_of_the_code() -> None:
    """DOC-03"""
    told = {first_code(cells[0]) for cells in table(page("loop.md"), "move", "when")}
    assert told == {one.value for one in Move}


def test_the_files_that_the_loop_names_are_there() -> None:
    """DOC-03"""
    for cells in table(page("loop.md"), "moment", "what happens"):
        path = first_code(cells[2])
        assert any((ROOT / base / path).exists() for base in ("", "orchestrator")), path


def test_the_strategies_to_choose_from_are_those_that_exist() -> None:
    """DOC-09: the selection table, their modes, and what they keep."""
    chosen = table(page("strategies.md"), "you have", "take")
    assert len(chosen) >= 8
    told = table(page("strategies.md"), "strategy", "modes")
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
    assert words == sorted(words, key=lambda word: word.removeprefix("Agent").lower()) or words == (
        sorted(words, key=str.lower)
    )


def test_the_decisions_and_the_traps_are_all_there() -> None:
    """DOC-07: a matrix row per disagreement, and each trap with requirements that exist."""
    matrix = table(page("decisions.md"), "#", "subject")
    assert [cells[0] for cells in matrix] == [f"DIS-{number:02}" for number in range(1, 35)]
    traps = table(page("decisions.md"), "trap", "what happens")
    ids = {one.id for one in requirements()}
    assert len(traps) == 20
    for cells in traps:
        assert set(cells[2].split(", ")) <= ids


def test_what_the_roadmap_calls_open_is_open_and_the_four_phases_are_there() -> None:
    """DOC-06"""
    held = {row.id for row in requirements() if row.id in named_in() and not row.why_open}
    phases = table(page("roadmap.md"), "phase", "item")
    assert {cells[0] for cells in phases} == {"1", "2", "3", "4"}
    assert all(cells[2].startswith(("done", "open", "measured")) for cells in phases)
    named = set(re.findall(r"\b[A-Z]{2,6}-\d\d\b", page("roadmap.md")))
    assert named & held == set(), "tests hold these now: say so in docs/roadmap.md"
    assert named <= {one.id for one in requirements()}


# ---------------------------------------------------------------------------------- operations

APP = """\
import json
from stepfleet.orchestrator.settings import load_settings
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


def test_celerys_settings_are_told_as_they_are() -> None:
    """DOC-10, DIST-07"""
    done = subprocess.run(
        [sys.executable, "-c", APP], capture_output=True, text=True, timeout=60, check=True
    )
    conf = json.loads(done.stdout)
    defaults = Settings.model_fields
    told = {}
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


def test_the_settings_that_operators_turn_have_the_defaults_that_are_told() -> None:
    """DOC-10"""
    for cells in table(page("operations.md"), "setting", "default"):
        default = Settings.model_fields[first_code(cells[0])].default
        if default is not None:
            assert float(cells[1]) == default if _is_number(default) else (
                cells[1].strip("`") == default
            ), cells[0]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def test_the_sections_of_operations_are_there() -> None:
    """DOC-10"""
    heads = re.findall(r"^##+ (.+)$", page("operations.md"), re.MULTILINE)
    assert {"Celery", "Scaling", "Worker limits", "Recovery"} <= set(heads)
    assert "**Visibility timeout.**" in page("operations.md")
