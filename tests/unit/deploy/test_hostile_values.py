"""A string of the values stays that string in the manifests, whatever it says, or is refused."""

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote_plus

import pytest
import yaml
from support import manifests
from support.manifests import CHART, EXAMPLES, Manifest

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
PLAIN = "plainword"
HOSTILE = (
    "a\n- name: evil\n  image: evil",
    "a\n---\nkind: Pod",
    '"}, {name: *a',
    "a: b # c",
    "yes",
    "null",
    "0x10",
    "1.5",
    "2026-01-01",
)
Path = tuple[str | int, ...]


def strings(schema: dict[str, Any], path: Path = ()) -> Iterator[Path]:
    """Yield where the values may have a string of any choice; maps and lists have one each."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    if "string" in schema.get("type", ()):
        yield path
    for name, inner in schema.get("properties", {}).items():
        yield from strings(inner, (*path, name))
    if isinstance(inner := schema.get("additionalProperties"), dict):
        yield from strings(inner, (*path, "default" if path == ("workers",) else "ANY"))
    if isinstance(inner := schema.get("items"), dict):
        yield from strings(inner, (*path, 0))


LISTS = {path[-2] for path in strings(SCHEMA) if path[-1] == 0}


def values(given: str, places: list[Path], *, trial: bool) -> dict[str, Any]:
    """Return values with everything on and a string at each of the places."""
    made: dict[str, Any] = yaml.safe_load((EXAMPLES / "production.yaml").read_text())
    made["redis"]["trial"] = {"enabled": trial}
    made["workers"]["hpa"] = {
        "slots": 2,
        "queues": ["tools"],
        "autoscaling": {"type": "hpa", "max": 2},
    }
    made["workers"]["default"] |= {"slots": 2}
    for *folders, last in places:
        inner: Any = made
        for folder in folders:
            inner = inner.setdefault(folder, [] if folder in LISTS else {})
        if last == 0:
            inner[:] = [given]
        else:
            inner[last] = given
    return made


def rendered(given: dict[str, Any]) -> list[Manifest]:
    made = manifests.manifests(manifests.helm_template(values=given))
    for each in made:
        template = each.get("spec", {}).get("template", {})
        template.get("metadata", {}).get("annotations", {}).pop("checksum/config", None)
    return made


def put(tree: Any, given: str) -> Any:
    """Return the manifests with another string for the plain one, encoded in an address."""
    if isinstance(tree, dict):
        return {key: put(inner, given) for key, inner in tree.items()}
    if isinstance(tree, list):
        return [put(inner, given) for inner in tree]
    if isinstance(tree, str):
        tree = tree.replace(f"queue={PLAIN}", f"queue={quote_plus(given)}")
        return tree.replace(PLAIN, given)
    return tree


@pytest.mark.parametrize("trial", [False, True])
@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_string_arrives_as_it_is_or_is_refused(hostile: str, trial: bool) -> None:
    """OPS-01: all places of the schema at once; with the hostile string only its places differ."""
    places = list(strings(SCHEMA))
    refused = manifests.helm_run(
        "template", "fleet", str(CHART), values=values(hostile, places, trial=trial)
    )
    named = set(re.findall(r"at '/([^']*)'", refused.stderr))
    taken = [place for place in places if "/".join(map(str, place)) not in named]
    assert named
    assert {("agents",), ("queue",), ("config",), ("externalSecret", "key")} <= set(taken)
    plain = rendered(values(PLAIN, taken, trial=trial))
    assert rendered(values(hostile, taken, trial=trial)) == put(plain, hostile)
    assert json.dumps(plain).count(PLAIN) > len(taken)


@pytest.mark.parametrize("name", ["7", "1e3", "0x10", "7" * 45])
def test_a_name_of_digits_is_a_string(name: str) -> None:
    """OPS-01: of a group and a release; PyYAML takes 1e3 for a string, Kubernetes does not."""
    given = values(PLAIN, [], trial=True)
    given["workers"] = {name[:15]: {"podLabels": {"yes": name}}, "default": None}
    made = manifests.helm_run("template", name, str(CHART), values=given)
    assert made.returncode == 0, made.stderr
    assert re.findall(rf"[:,\[-] *{name}\s*$", made.stdout, re.MULTILINE) == []
    for each in manifests.manifests(made.stdout):
        manifests.check_schema(each)
