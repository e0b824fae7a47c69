"""Every sample of every page runs, as it stands, and prints what the page says."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import Block, blocks_of, files_of, pages, run_samples, samples_of
from fleet_workers import FleetWorker

from stepfleet.worker.testing import ModelServer, Reply, RequestRecord, ToolCallReply

TESTS = Path(__file__).parents[1]
TEXTS = pages()
BLOCKS = {name: blocks_of(text) for name, text in TEXTS.items()}
ELSEWHERE = {
    "README.md": "test_readme.py",
    "docs/checkpoints.md": "test_checkpoints_page.py",
    "docs/configuration.md": "test_configuration_page.py",
    "docs/events.md": "test_events_page.py",
    "docs/memory.md": "test_memory_page.py",
    "docs/tools.md": "test_tools_page.py",
}
"""Pages whose samples have a test of their own."""


def has_python(blocks: tuple[Block, ...]) -> bool:
    return any(one.language == "python" for one in blocks)


RUN_HERE = [name for name, blocks in BLOCKS.items() if has_python(blocks) and name not in ELSEWHERE]


def prices(request: RequestRecord) -> Reply:
    """Ask for the price of the product that the question names; say what is known then."""
    product = request.question.rstrip("?").split()[-2]
    if not request.answers:
        return Reply(tool_calls=(ToolCallReply("price", {"product": product}),))
    if request.answers[-1].content.startswith("Error"):
        return Reply(f"No price is known for a {product}.")
    return Reply(f"A {product} costs {request.answers[-1].content}.")


def short(request: RequestRecord) -> Reply:
    """Say something short, by whatever way there is."""
    if "final_answer" in request.tools:
        return Reply(tool_calls=(ToolCallReply("final_answer", {"answer": "It is so."}),))
    return Reply("It is so.")


RULES: dict[str, Callable[[RequestRecord], Reply]] = {"docs/troubleshooting.md": prices}


@pytest.mark.parametrize("name", RUN_HERE)
def test_the_samples_of_a_page_run_and_print_what_it_says(
    name: str,
    tmp_path: Path,
    redis_url: str,
    model: ModelServer,
    start_worker: Callable[..., FleetWorker],
) -> None:
    """DOC-01, DOC-02, DOC-03, DOC-05: with a real worker where the page has agents for it."""
    blocks = BLOCKS[name]
    for file, text in files_of(blocks).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    model.follow(RULES.get(name, short))
    if (tmp_path / "agents.py").exists():
        start_worker(env={"STEPFLEET_AGENTS": str(tmp_path / "agents.py")})
    samples = list(samples_of(blocks))
    env = {
        "STEPFLEET_REDIS_URL": redis_url,
        "OPENAI_BASE_URL": model.url,
        "OPENAI_API_KEY": "none",
    }
    printed = run_samples(samples, tmp_path, env)
    for sample, said in zip(samples, printed, strict=True):
        assert said == (sample.prints or ""), f"{name}, line {sample.line}"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_pages_that_are_run_elsewhere_are_read_by_that_test(name: str) -> None:
    """DOC-05"""
    (test,) = TESTS.rglob(ELSEWHERE[name])
    text = test.read_text(encoding="utf-8")
    assert Path(name).name in text
    assert "python" in text
    assert re.search(r"exec\(|subprocess\.run\(", text)


@pytest.mark.parametrize("name", [name for name, blocks in BLOCKS.items() if has_python(blocks)])
def test_fragments_are_python_all_the_same(name: str) -> None:
    for block in BLOCKS[name]:
        if block.is_fragment:
            compile(block.text, f"{name}, line {block.line}", "exec")
