"""What pages name is there: classes, fields, files, tests, commands. Drawings are sound."""

import importlib
import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from support.documents.documents import DOCS, ROOT, Block, blocks_of, first_code, pages, table

import stepfleet.orchestrator as public
from stepfleet.orchestrator import Lifecycle
from stepfleet.orchestrator.cli.main import build

TEXTS = pages()
MODULES = (
    *("continuation", "errors", "continuation.error_policy", "events.subscribers"),
    *("protocol.claim", "protocol.verdict", "records.steps", "records.errors"),
    "records.calls.tools",
    *("tools.schemas.handles", "tools", "tools.builtin", "agents.strategies", "agents.recall"),
    *("agents.answers.definitions", "records.responses", "client.runs", "records.state"),
    "memory.policy",
)
OLD_NAMES = {
    *("AgentMemory", "HandlerOutcome", "RunResult", "ErrorPresenceCheck", "RetryLimit"),
    *("IterationResult", "ToolCallExecution"),
}
"""Words of earlier designs, which pages explain."""
WORD = re.compile(r"`(\w+)`")
SHELLS = {"bash", "console", "sh"}


def page(name: str) -> str:
    return TEXTS[f"docs/{name}"]


def blocks(*languages: str) -> Iterator[tuple[str, Block]]:
    for name, text in TEXTS.items():
        for block in blocks_of(text):
            if block.language in languages:
                yield name, block


# ------------------------------------------------------------------------------ names and links


LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]+)\)")
PATH = re.compile(r"`((?:orchestrator|worker|docs|examples|deploy|tests)/[\w./-]+)`")


def those_with(*patterns: re.Pattern[str]) -> list[str]:
    return [name for name, text in TEXTS.items() if any(one.search(text) for one in patterns)]


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


@pytest.mark.parametrize("name", ["primitives.md", "protocols.md", "glossary.md", "migration.md"])
def test_every_class_that_a_page_names_is_there(name: str) -> None:
    """DOC-03, DOC-08: `CamelCase` and `CamelCase.attribute` resolve in the packages."""
    named = set(re.findall(r"`([A-Z][a-z]+[A-Z]\w*(?:\.\w+)?)(?:\([^`]*\))?`", page(name)))
    named -= {"InlineWorker", "CamelCase"}
    assert named
    assert {one for one in named if not is_known(one)} - OLD_NAMES == set()


def test_the_fields_of_the_values_are_those_of_their_classes() -> None:
    """DOC-03"""
    rows = table(page("primitives.md"), "value", "is")
    named = [(first_code(row[0]), field) for row in rows for field in WORD.findall(row[2])]
    assert named
    for name, field in named:
        owner = getattr(public, name)
        fields = {**getattr(owner, "model_fields", {}), **owner.__annotations__}
        assert hasattr(owner, field) or field in fields, (owner, field)


def test_the_methods_of_the_protocols_are_those_of_their_classes() -> None:
    """DOC-03"""
    rows = table(page("protocols.md"), "protocol", "methods")
    named = [f"{first_code(row[0])}.{method}" for row in rows for method in WORD.findall(row[1])]
    assert named
    assert [one for one in named if not is_known(one)] == []


@pytest.mark.parametrize("name", those_with(LINK, PATH))
def test_every_link_and_every_path_leads_somewhere(name: str) -> None:
    """DOC-03"""
    folder = (ROOT / name).parent
    links = {(folder, target) for target in LINK.findall(TEXTS[name])}
    named = {(ROOT, path) for path in PATH.findall(TEXTS[name])}
    assert links or named
    assert {path for base, path in links | named if not (base / path).exists()} == set()


@pytest.mark.parametrize("name", those_with(ANCHOR))
def test_anchors_in_links_are_headings(name: str) -> None:
    for target, anchor in ANCHOR.findall(TEXTS[name]):
        file = (ROOT / name).parent / target if target else ROOT / name
        heads = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads}
        assert anchor in slugs


def test_the_index_lists_every_page() -> None:
    listed = set(re.findall(r"\]\(((?:internals/)?\w+\.md)\)", page("README.md")))
    there = [*DOCS.glob("*.md"), *DOCS.glob("internals/*.md")]
    assert listed == {str(one.relative_to(DOCS)) for one in there} - {"README.md"}


def test_the_pages_for_users_are_short() -> None:
    """DOC-03: what proves, and what only the code's authors need, is in docs/internals.

    Of the words, 1,500 are for operating a fleet: how to archive runs, and how to plan for them.
    """
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("how-to/*.md")]
    texts = {one: one.read_text(encoding="utf-8") for one in pages}
    assert sum(len(text.split()) for text in texts.values()) <= 51_500
    assert len(texts[ROOT / "README.md"].split()) <= 800
    for name, text in texts.items():
        for line in re.findall(r"^\|.*$", text, re.MULTILINE):
            for cell in re.split(r"(?<!\\)\|", line):
                assert len(cell.split()) <= 40, f"{name}: {cell}"


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
    commands: dict[str, Any] = typer.main.get_command(build()).commands  # type: ignore[attr-defined]
    seen = 0
    for name, words in command_lines():
        if words[0].startswith("-"):
            continue
        assert words[0] in commands, (name, words)
        command = commands[words[0]].load()
        if group := getattr(command, "commands", None):
            assert words[1:] == [] or words[1] in group, (name, words)
            command = group[words[1]] if words[1:] else command
        options = {opt for one in command.params for opt in (*one.opts, *one.secondary_opts)}
        for word in words[1:]:
            if word.startswith("--"):
                assert word.partition("=")[0] in options, (name, words)
        seen += 1
    assert seen > 30


# ------------------------------------------------------------------------------------ drawings

NODE = r"\w+(?:\[\([^\])]+\)\]|\[[^\]]+\]|\{\{[^}]+\}\})?"
FLOW = re.compile(rf"subgraph \w+ \[[^\]]+\]$|end$|{NODE}(?: (?:-- [\w ,]+ )?--> {NODE})*$")
SEQUENCE = re.compile(r"participant \w+ as [^;#]+$|Note over \w+: [^;#]+$|\w+--?>>\w+: [^;#]+$")
STATE = re.compile(r"(?:\[\*\]|\w+) --> \w+: [^;:]+$")
CLASS = re.compile(r"class \w+ \{$|\}$|\w+(?:: \w+)?$|\w+ (?:\*--|o--|\.\.>) \w+(?: : [^:]+)?$")
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
    assert {target for _, target, _ in arrows} == {state.value for state in Lifecycle}
    told = {cells[0] for cells in table(page("internals/guarantees.md"), "arrow", "when")}
    unexplained = {
        label for _, target, label in arrows if not {label, target, *label.split(", ")} & told
    }
    assert unexplained == set()
    ends = {"completed", "stopped", "failed"}
    assert told - ends <= {word for _, _, label in arrows for word in (label, *label.split(", "))}


def test_the_guarantees_name_tests_that_are_there() -> None:
    """DOC-10"""
    source = "\n".join(
        one.read_text(encoding="utf-8") for one in (ROOT / "tests").rglob("test_*.py")
    )
    names = re.findall(r"`(test_\w+)`", page("internals/guarantees.md"))
    assert len(names) > 10
    modules = {one.stem for one in (ROOT / "tests").rglob("test_*.py")}
    assert {one for one in names if f"def {one}(" not in source and one not in modules} == set()


def test_the_architecture_has_every_room() -> None:
    """DOC-03"""
    told = {
        word
        for cells in table(page("internals/map.md"), "room", "holds")
        for word in re.findall(r"\b([a-z_]+)\b(?!\.)", cells[0])
    }
    bases = (ROOT / "orchestrator", ROOT / "worker")
    rooms = {one.parent.name for base in bases for one in base.glob("*/__init__.py")}
    assert rooms - told == set()
