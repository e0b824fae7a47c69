"""Every sample of every page runs, as it stands, and prints what the page says."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from support.documents.documents import (
    DOCS,
    Block,
    blocks_of,
    files_of,
    pages,
    run_samples,
    samples_of,
)
from support.workers.fleet_workers import FleetWorker
from support.workers.known_agents import until_known

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

TESTS = Path(__file__).parents[2]
RECIPE = "docs/how-to/retry-what-failed.md"
RECIPES = (RECIPE, "docs/how-to/costs-by-tenant.md")
TEXTS = pages() | {one: (DOCS.parent / one).read_text(encoding="utf-8") for one in RECIPES}
BLOCKS = {name: blocks_of(text) for name, text in TEXTS.items()}
PYTHON = ("```python", '"python"')
TESTS_TEXTS = {one: one.read_text(encoding="utf-8") for one in TESTS.rglob("test_*.py")}


def runners(name: str) -> list[Path]:
    """Return the tests that read a page by its name and take its Python blocks."""
    wanted = f'"{Path(name).name}"'
    tests = (one for one, text in TESTS_TEXTS.items() if wanted in text and one != Path(__file__))
    return [one for one in tests if any(part in TESTS_TEXTS[one] for part in PYTHON)]


WITH_PYTHON = [
    name for name, blocks in BLOCKS.items() if any(one.language == "python" for one in blocks)
]
ELSEWHERE = {name: found for name in WITH_PYTHON if (found := runners(name))}
"""Pages whose samples have a test of their own."""
RUN_HERE = [name for name in WITH_PYTHON if name not in ELSEWHERE]


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


def counts(request: RequestRecord) -> Reply:
    """Ask for the stock of the product that the question names, until there is no error."""
    product = request.question.split()[-1]
    if not request.answers or request.answers[-1].content.startswith("Error"):
        return Reply(tool_calls=(ToolCallReply("stock", {"product": product}),))
    return Reply(f"There are {request.answers[-1].content}.")


RULES: dict[str, Callable[[RequestRecord], Reply]] = {
    "docs/troubleshooting.md": prices,
    RECIPE: counts,
}


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
        until_known(redis_url, *load_agents(str(tmp_path / "agents.py")))
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
def test_pages_that_are_run_elsewhere_are_executed_there(name: str) -> None:
    """DOC-05"""
    texts = [one.read_text(encoding="utf-8") for one in ELSEWHERE[name]]
    assert any(re.search(r"\bexec\(|subprocess\.run\(", text) for text in texts)


@pytest.mark.parametrize(
    ("name", "block"),
    [(name, block) for name in WITH_PYTHON for block in BLOCKS[name] if block.is_fragment],
)
def test_fragments_are_python_all_the_same(name: str, block: Block) -> None:
    assert compile(block.text, f"{name}, line {block.line}", "exec").co_code


def test_the_keys_of_a_store_at_work_are_those_that_the_map_lists(
    tmp_path: Path, redis_url: str, model: ModelServer, start_worker: Callable[..., FleetWorker]
) -> None:
    """DOC-03: a batch of runs that call a tool and tell their text, looked at key by key."""
    agents = files_of(BLOCKS["docs/troubleshooting.md"])["agents.py"]
    (tmp_path / "agents.py").write_text(agents, encoding="utf-8")
    model.follow(prices)
    start_worker(env={"STEPFLEET_AGENTS": str(tmp_path / "agents.py")})
    patient = load_agents(str(tmp_path / "agents.py"))["patient"]
    lines = [{"id": str(number), "input": "What does a lamp cost?"} for number in range(5)]
    with Fleet(redis_url) as fleet:
        batch = fleet.submit_batch(lines, patient, broadcast="standard")
        assert [one.status for one in batch.results()] == ["completed"] * len(lines)
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        found = {shape_of(key) for key in client.scan_iter("sf:*")}
    told = re.findall(r"^\| (`sf:.+?) \| ", TEXTS["docs/internals/map.md"], re.MULTILINE)
    listed = {shape_of(key) for cell in told for key in re.findall(r"`(sf:.+?)`", cell)}
    assert found - listed == set()
    assert {"sf:{}:run:*", "sf:{}:run:*:log", "sf:{}:batch:*", "sf:agents"} <= found


def shape_of(key: str) -> str:
    """Return a key without ids and hash tags."""
    key = re.sub(r"\{[^}]*\}", "{}", key)
    return re.sub(r"(:run:|:runs:|:batch:)[^:]+", r"\1*", key)
