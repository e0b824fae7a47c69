"""An agent's prompt: fields of a row, and no way beyond them."""

import time
from pathlib import Path
from typing import Any

import pytest

from stepfleet.orchestrator import Agent, AgentBuilder, AgentConfig, ConfigurationError, builder_of
from stepfleet.orchestrator.agents.prompt import worded

ROW = {
    "sku": "L1",
    "item": {"name": "Lamp", "tags": ["red", {"deep": 1}]},
    "price": 1.5,
    "none": None,
    "Product Name": "a {sku}",
    "a.b": "dotted",
    "ok": True,
}


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("Sku {sku}, {sku}!", "Sku L1, L1!"),
        ("{item.name}", "Lamp"),
        ("{item.tags.0} {item.tags[1].deep}", "red 1"),
        ("{item.tags}", '["red",{"deep":1}]'),
        ("{price} {ok} <{none}>", "1.5 true <>"),
        ("{ Product Name }", "a {sku}"),
        ("{a.b}", "dotted"),
        ('{{"sku": "{sku}"}}', '{"sku": "L1"}'),
        ("{{{sku}}}", "{L1}"),
    ],
)
def test_places_are_filled_with_the_fields_of_the_row(prompt: str, text: str) -> None:
    assert worded(prompt, ROW) == text


@pytest.mark.parametrize(
    "name",
    [
        *("sky", "item.nam", "item.tags.2", "item.tags.-1", "item.name.upper", "sku.0"),
        *("__class__", "item.__class__", "item.keys", "item.tags.__len__", f"item.tags.{9**30}"),
    ],
)
def test_what_is_no_field_is_named_with_those_that_are(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        worded(f"{{{name}}}", ROW)
    assert repr(name) in caught.value.message
    assert "there are: sku, item, price" in caught.value.message


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ("{sku:1000000000}", "cannot be filled in"),
        ("{sku!r}", "cannot be filled in"),
        ("{}", "cannot be filled in"),
        ('{"a": 1} {sku}', "cannot be filled in"),
        ("{sku", "single '{'; write '{{'"),
        ("sku} {sku}", "single '}'"),
        ("Classify this", "names no field"),
        ("{{sku}}", "names no field"),
        ("{sku}" + "x" * 1024 * 1024, "longer than 1,048,576 bytes"),
    ],
)
def test_a_prompt_that_cannot_be_filled_in_is_refused_with_its_agent(prompt: str, why: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Agent("clerk", model="openai:m", prompt=prompt)
    assert caught.value.message.startswith("agent 'clerk': field 'prompt'")
    assert why in caught.value.message


def test_a_row_in_very_many_places_is_refused_before_it_is_put_together() -> None:
    started = time.monotonic()
    with pytest.raises(ConfigurationError, match="more than 1,048,576 characters"):
        worded("{x}" * 100_000, {"x": "y" * 4_000_000})
    assert time.monotonic() - started < 10


def test_all_sources_of_a_configuration_give_the_prompt(tmp_path: Path) -> None:
    """CONF-02: code, builder, file and environment, the same digest."""
    prompt = "{description} is what?"
    file = tmp_path / "agents.toml"
    file.write_text(f"[agents.clerk]\nmodel = 'openai:m'\nprompt = '{prompt}'\n")
    bare = {"STEPFLEET_AGENT__CLERK__MODEL": "openai:m", "STEPFLEET_AGENT__CLERK__PROMPT": prompt}
    made = [
        Agent("clerk", model="openai:m", prompt=prompt),
        AgentBuilder("clerk").with_model("openai:m").with_prompt(prompt).build(),
        builder_of("clerk", file, {}).build(),
        builder_of("clerk", None, bare).build(),
    ]
    assert {one.config.prompt for one in made} == {prompt}
    assert len({one.config.digest for one in made}) == 1
    assert made[0].config.digest != Agent("clerk", model="openai:m").config.digest


def test_a_run_cannot_change_the_prompt_since_its_input_is_worded_already() -> None:
    config = AgentConfig(name="a", model="openai:m", prompt="{x}")
    overrides: dict[str, Any] = {"prompt": "{y}"}
    with pytest.raises(ConfigurationError, match="field 'prompt' cannot be overridden per run"):
        config.with_overrides(overrides)
