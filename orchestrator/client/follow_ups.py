"""A batch that begins when another one has ended: checked and registered here, submitted there."""

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.agents.keywords import RunOverrides
from stepfleet.orchestrator.agents.overrides import stored_overrides
from stepfleet.orchestrator.agents.prompt import places_in
from stepfleet.orchestrator.batches.files.lines import input_of, parse_tenant
from stepfleet.orchestrator.batches.following import OF_PAGES, OF_RUNS
from stepfleet.orchestrator.client.session import Client
from stepfleet.orchestrator.client.submission.inputs import Priority
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.limits.limit import priority_of
from stepfleet.orchestrator.protocol.composing import OUTPUT, OUTPUTS, check_places
from stepfleet.orchestrator.records.batch import FollowUp, Manifest
from stepfleet.orchestrator.store.batches.follow_ups import follow_up_id

MOST_ROWS = 1_000
"""Rows of a page."""
MOST_FOLLOWING = 100
"""Batches that follow one batch."""


class ThenOptions(RunOverrides, total=False):
    """The options of `then` beside its input: for all runs of the batch that follows."""

    page: int | None
    until_one: bool
    after_failed: Literal["skip", "stop"]
    name: str | None
    tenant: str | None
    priority: Priority | None


async def registered(
    client: Client,
    source: Manifest,
    agent: Agent | str,
    text: str | None,
    options: Mapping[str, Any],
) -> tuple[Manifest, bool]:
    """Return the batch that follows `source`, and whether it is new.

    The same arguments are the same batch. Raises `ConfigurationError` that names field and fix.
    """
    config = await client.config_of(agent)
    changes = dict(options)
    name = _name(changes.pop("name", None)) or f"{source.name or source.batch_id}: {config.name}"
    plan = _plan(config, text, changes)
    digest = hashlib.sha256(plan.to_json().encode()).hexdigest()
    batch_id = follow_up_id(source.batch_id, digest)
    found, source = (
        await client.store.batches.find(batch_id),
        await client.store.batches.get(source.batch_id),
    )
    index = client.store.follow_ups
    if found and not found.refused:
        if not (found.sealed or found.cancel_requested):
            await index.wake(batch_id)  # the client that has registered it may have died before
        return found, False
    await _ensure_room(client, source)
    await client.accept([config])
    await client.store.configs.save(config)
    manifest = Manifest(
        batch_id=batch_id,
        key=f"then:{source.batch_id}",
        digest=digest,
        name=name[:500],
        agent=config.name,
        created=await client.store.batches.now(),
        total=0,
        rows=0,
        follows=source.batch_id,
        plan=plan,
    )
    await index.register(manifest)
    if await client.store.batches.is_over(source.batch_id, source):  # no worker will see it end
        await client.control.interrupt_batch(source.batch_id)
    return manifest, True


def _plan(config: AgentConfig, text: str | None, changes: Mapping[str, Any]) -> FollowUp:
    """Return what the batch does, checked; its name is no part of that."""
    overrides = dict(changes)
    page = _page(overrides.pop("page", None))
    places = OF_RUNS if page is None else OF_PAGES
    text = f"{{{OUTPUT if page is None else OUTPUTS}}}" if text is None else text
    if page is None and isinstance(text, str) and (named := _of_pages(text)):
        msg = f"field 'input' names {{{named}}}, which pages have: give page=N, the rows of each"
        raise ConfigurationError(f"{msg}; the result of a single run is {{{OUTPUT}}}")
    check_places(text, places)
    input_of(text, "input", config.prompt)
    until_one, rule = overrides.pop("until_one", False), overrides.pop("after_failed", "skip")
    return FollowUp(
        agent=config.name,
        config=config.digest,
        input=text,
        page=page,
        until_one=_until_one(page, given=until_one),
        after_failed=_rule(rule),
        tenant=parse_tenant(overrides.pop("tenant", None)),
        priority=priority_of(overrides.pop("priority", None)),
        overrides=stored_overrides(config, overrides),
    )


def _of_pages(text: str) -> str:
    """Return the first place that only an input of a page has; empty without one."""
    try:
        return next((one for one in places_in(text) if one in {*OF_PAGES} - {*OF_RUNS}), "")
    except ValueError:
        return ""


async def _ensure_room(client: Client, source: Manifest) -> None:
    """Raise `ConfigurationError` where no further batch can follow `source`."""
    if len(source.next) >= MOST_FOLLOWING:
        msg = f"{MOST_FOLLOWING} batches follow batch {source.batch_id}; let some follow others"
        raise ConfigurationError(msg)
    progress = await client.store.batches.progress(source)
    if progress.past_retention:
        msg = f"{progress.past_retention:,} results of batch {source.batch_id} are past retention"
        raise ConfigurationError(f"{msg}: submit it again, and what follows it with it")


def _name(given: Any) -> str:
    if given is None or isinstance(given, str):
        return given or ""
    raise ConfigurationError(f"field 'name' is {ascii(given)[:70]}; write a text")


def _page(given: Any) -> int | None:
    if given is None:
        return None
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= MOST_ROWS:
        return given
    msg = f"field 'page' is {given!r}; write how many rows a run gets, 1 to {MOST_ROWS:,}"
    raise ConfigurationError(msg)


def _until_one(page: int | None, *, given: Any) -> bool:
    if given and (page is None or page == 1):
        raise ConfigurationError("field 'until_one' needs a 'page' of 2 rows or more, as page=100")
    return bool(given)


def _rule(given: Any) -> Literal["skip", "stop"]:
    if given == "skip":
        return "skip"
    if given == "stop":
        return "stop"
    raise ConfigurationError(f"field 'after_failed' is {given!r}; write 'skip' or 'stop'")
