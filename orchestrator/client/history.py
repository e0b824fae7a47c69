"""What a client does with a run's past: snapshots, checkpoints, forks, comparisons, costs."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Unpack
from uuid import UUID

from stepfleet.orchestrator.agents.agent import Agent, criteria_without_code
from stepfleet.orchestrator.agents.config import (
    AgentConfig,
    RunOverrides,
    merged_overrides,
    stored_overrides,
)
from stepfleet.orchestrator.batches.files.lines import parse_input, parse_metadata
from stepfleet.orchestrator.batches.files.openai_format import PLAIN_AGENT
from stepfleet.orchestrator.batches.results import Pause
from stepfleet.orchestrator.client.audit import changes
from stepfleet.orchestrator.client.checkpoints import AgentCheckpoint
from stepfleet.orchestrator.client.comparison import RunComparison, compared
from stepfleet.orchestrator.client.control import ensure_resumable
from stepfleet.orchestrator.client.copies import (
    capture,
    cost_calls,
    forked,
    of_agent,
    restored,
    with_tools,
)
from stepfleet.orchestrator.client.inputs import checked_id
from stepfleet.orchestrator.client.session import Client, FleetSession
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models.pricing.ledger import CostStatistics, ModelCall, statistics_of
from stepfleet.orchestrator.protocol.serialization import SlimSerializationConfig
from stepfleet.orchestrator.records.run.trace import ToolTraces, tool_traces_of
from stepfleet.orchestrator.store.lua import run_script
from stepfleet.orchestrator.store.runs.control import COST_FROM
from stepfleet.orchestrator.store.runs.reading import StoredRun

Checkpoints = AsyncGenerator[AgentCheckpoint, None]
_CLEARED = "traces_cleared"


class RestoreOptions(RunOverrides, total=False):
    """What `restore` and `load_state` take besides a checkpoint and an agent."""

    run_id: UUID | str | None


class AsyncFleetHistory:
    """The past of runs: `fleet.history`.

    `snapshot` is a short form of a run, `checkpoint` all of it, to `restore` or save as a file;
    `fork` starts another run from any step; costs and tool calls are listed over all its sessions.
    """

    def __init__(self, session: FleetSession) -> None:
        self._session = session

    async def snapshot(
        self, run_id: str, config: SlimSerializationConfig | None = None
    ) -> dict[str, Any]:
        """Return a short form of a run, as JSON data; by default with the standard preset.

        Only what the configuration keeps is read from Redis.
        """
        store = await self._session.store()
        return await store.runs.snapshot(run_id, config or SlimSerializationConfig.standard())

    async def checkpoint(self, run_id: str, *, at: int | None = None) -> AgentCheckpoint:
        """Return everything of a run, as it is now or as it was after its first `at` steps.

        A step under way is not part of it: where the checkpoint is restored, it is done again.
        Raises `NotFoundError` for an unknown run, or one with fewer steps.
        """
        client = await self._session.open()
        return await _captured(client, await client.store.runs.get(run_id), at)

    async def checkpoints(self, run_id: str, *, every: int, follow: bool = False) -> Checkpoints:
        """Yield a run's checkpoints after each `every` steps, the oldest first.

        With `follow`, further ones as the run gets there, until it has ended. They are made from
        the run's log: workers neither write nor know them.
        """
        if every < 1:
            raise ConfigurationError(f"field 'every' is {every}; write 1 step or more")
        client = await self._session.open()
        at, pause = every, Pause()
        while True:
            status, done = await client.store.runs.standing(run_id)
            if at <= done:
                run = await client.store.runs.get(run_id)
                while at <= len(run.log):
                    yield await _captured(client, run, at)
                    at += every
                continue
            if not follow or status.is_terminal:
                return
            await pause.wait(idle=True)

    @changes("restore", "run {checkpoint.run_id}")
    async def restore(
        self,
        checkpoint: AgentCheckpoint,
        agent: Agent | str | None = None,
        *,
        run_id: UUID | str | None = None,
        **overrides: Unpack[RunOverrides],
    ) -> str:
        """Create the run of a checkpoint and return its id; it goes on from there.

        A run that had ended is there again as it ended, for `retry`, `send` and `fork`. It keeps
        its id unless `run_id` (UUID) gives a copy another one; restoring the same again changes
        nothing. The configuration is the checkpoint's, or that of `agent` where one is given;
        `overrides` change it. Raises `ConfigurationError` where another run has the id, no worker
        knows the agent, or a limit would end the run at once.
        """
        client = await self._session.open()
        config = await _config_for(client, checkpoint, agent)
        own = stored_overrides(config, overrides)
        wanted = checked_id(run_id) if run_id is not None else _own_id(checkpoint)
        imported = restored(checkpoint, config, wanted, own)
        if (agent is not None or own) and not imported.state.status.is_terminal:
            criteria = criteria_without_code(config.with_overrides(own))
            ensure_resumable(wanted, criteria, imported.state, "restore")
        await client.accept([config])
        await client.store.configs.save(config)
        await client.store.submission.adopt(imported)
        return imported.run.run_id

    async def save_state(self, run_id: str) -> dict[str, Any]:
        """Return a run's checkpoint as JSON data."""
        return (await self.checkpoint(run_id)).to_dict()

    async def load_state(
        self,
        state: Mapping[str, Any],
        agent: Agent | str | None = None,
        **options: Unpack[RestoreOptions],
    ) -> str:
        """Create the run that `save_state` has returned; `options` are those of `restore`.

        Raises `SerializationError` if `state` is not a checkpoint.
        """
        return await self.restore(AgentCheckpoint.from_dict(dict(state)), agent, **options)

    @changes("fork", "run {run_id}")
    async def fork(
        self,
        run_id: str,
        *,
        at: int | None = None,
        message: str | None = None,
        tools: Sequence[str] | None = None,
        new_run_id: UUID | str | None = None,
        metadata: Mapping[str, Any] | None = None,
        **overrides: Unpack[RunOverrides],
    ) -> str:
        """Start a run that begins with the first `at` steps of another, and return its id.

        `overrides` change its configuration, such as `model="..."`, `instructions="..."` or
        `max_steps=20`; `tools` are names of those it may use. `message` takes the place of what
        the run was given at that point: after its answer a further turn, at 0 another input.
        The other run may be active, and stays as it is. Its steps count in the fork's totals;
        the result's `origin` holds their share. Forking to the same
        `new_run_id` (UUID) again changes nothing. Raises `ConfigurationError`, with the fix.
        """
        client = await self._session.open()
        run = await client.store.runs.get(run_id)
        run = run if at is None else await client.store.runs.as_before(run, at)
        config = await client.store.configs.load(run.header["config"])
        if tools is not None:
            config = with_tools(config, await _known(client, config), list(tools))
        own = stored_overrides(config, overrides)
        imported = forked(
            run,
            checked_id(new_run_id, "new_run_id"),
            config,
            merged_overrides(run.overrides, own),
            at=at,
            message=() if message is None else parse_input(message, "message"),
            metadata=None if metadata is None else parse_metadata(dict(metadata)),
        )
        await client.accept([config])
        await client.store.configs.save(config)
        await client.store.submission.adopt(imported)
        return imported.run.run_id

    async def compare(self, first: str, second: str) -> RunComparison:
        """Return how the run `second` differs from `first`, as far as both have come."""
        store = await self._session.store()
        one: StoredRun = await store.runs.get(first)
        return compared(one, await store.runs.get(second))

    async def tool_traces(self, run_id: str) -> ToolTraces:
        """Return the tool calls of a run's committed steps since they were last cleared.

        Raises `NotFoundError` if there is no such run.
        """
        run = await (await self._session.store()).runs.get(run_id)
        cleared = int(run.header.get(_CLEARED, "0"))
        return tool_traces_of((step.result for step in run.log), cleared)

    @changes("clear", "tool traces of run {run_id}")
    async def clear_tool_traces(self, run_id: str) -> int:
        """Leave the calls so far out of `tool_traces`; return how many the run has had.

        The run's log keeps them: results, conversation and retries are as before. Raises
        `NotFoundError` if there is no such run.
        """
        store = await self._session.store()
        run = await store.runs.get(run_id)
        count = sum(len(step.result.tool_calls) for step in run.log)
        keys = store.keys.script_keys(run_id, None)
        await run_script(store.connection, "clear_traces", keys, run_id, _CLEARED, count)
        return count

    async def get_cost_calls(self, run_id: str) -> tuple[ModelCall, ...]:
        """Return a run's committed model calls with their costs in USD, since the last reset."""
        run = await (await self._session.store()).runs.get(run_id)
        first = max(int(run.header.get(COST_FROM, "0")) - run.first, 0)
        return tuple(cost_calls(run.config, [logged.result for logged in run.log[first:]]))

    async def get_cost_stats(self, run_id: str) -> CostStatistics:
        """Return the sums over those calls, in all and by model."""
        return statistics_of(await self.get_cost_calls(run_id))

    async def get_cost_summary(self, run_id: str) -> str:
        """Return the sums as text, a line per model."""
        all_of = await self.get_cost_stats(run_id)
        tokens, cost = all_of.total_tokens, all_of.total_cost
        lines = [f"{all_of.total_calls} calls, {tokens:,} tokens, {cost:.6f} USD"]
        for model, sums in sorted(all_of.by_model.items()):
            lines.append(
                f"  {model}: {sums.calls} calls, {sums.input_tokens:,} tokens in, "
                f"{sums.output_tokens:,} out, {sums.cost:.6f} USD"
            )
        return "\n".join(lines)

    @changes("reset", "costs of run {run_id}")
    async def reset_cost_tracking(self, run_id: str) -> None:
        """Let the statistics begin anew with the next step; the run's own totals stay.

        Raises `NotFoundError` if there is no run of that id.
        """
        store = await self._session.store()
        _, done = await store.runs.standing(run_id)
        await store.control.mark(run_id, COST_FROM, done)


def _own_id(checkpoint: AgentCheckpoint) -> str:
    """Return the id of a checkpoint's run. Raises `ConfigurationError` unless it is a UUID."""
    try:
        return str(UUID(checkpoint.run_id))
    except ValueError:  # of a run below another, perhaps
        msg = f"the checkpoint's run id {checkpoint.run_id!r:.100} is not a UUID; "
        raise ConfigurationError(f"{msg}choose another id (uuid.uuid4()) for this one") from None


async def _captured(client: Client, run: StoredRun, at: int | None) -> AgentCheckpoint:
    run = run if at is None else await client.store.runs.as_before(run, at)
    return capture(run, await client.store.runs.now(), at)


async def _known(client: Client, config: AgentConfig) -> AgentConfig:
    if config.name == PLAIN_AGENT:
        return config
    return await client.store.configs.named(config.name)


async def _config_for(
    client: Client, checkpoint: AgentCheckpoint, agent: Agent | str | None
) -> AgentConfig:
    """Return the agent's configuration, or the checkpoint's with the fields of the agent's code."""
    if agent is not None:
        return await client.config_of(agent)
    return of_agent(checkpoint.config, await _known(client, checkpoint.config))
