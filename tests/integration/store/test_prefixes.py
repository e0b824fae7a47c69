"""Fleets that share one Redis database, each with a prefix of its own."""

import pytest
import redis

from stepfleet.orchestrator import Agent, AsyncFleet, ConfigurationError
from stepfleet.orchestrator.settings.settings import Settings, load_settings
from stepfleet.worker.runtime.inline import InlineWorker
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.server import ModelServer

PREFIXES = ("", "dev:", "staging/")


def settings_of(redis_url: str, prefix: str, **given: str) -> Settings:
    return load_settings(redis_url=redis_url, prefix=prefix, **given)


async def test_fleets_of_one_database_see_nothing_of_each_other(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ModelServer() as model:
        monkeypatch.setenv("OPENAI_BASE_URL", model.url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        model.follow(lambda request: Reply(f"answer to {request.key}"))
        agent = Agent("clerk", model="openai:m")
        kept: dict[str, str] = {}
        for prefix in PREFIXES:
            settings = settings_of(redis_url, prefix)
            async with AsyncFleet(settings=settings) as fleet:
                assert await fleet.batches.newest() == []
                assert (await fleet.overview()).queue_length == 0
                batch = await fleet.submit_batch([{"id": "1", "input": "one"}], agent=agent)
                run_id = await fleet.submit(agent, f"of {prefix}")
                assert (await fleet.overview()).queue_length == 2
                async with InlineWorker(settings, [agent]) as worker:
                    await worker.finish(run_id)
                    assert [one.alive for one in (await fleet.overview()).workers] == [True]
                assert [one.batch_id for one in await fleet.batches.newest()] == [batch.id]
                for other in kept.values():
                    with pytest.raises(ConfigurationError):
                        await fleet.runs.result(other)
                kept[prefix] = run_id
        async with AsyncFleet(settings=settings_of(redis_url, "dev:")) as fleet:
            await fleet.pause()
            assert await fleet.runs.purge() == 1
        for prefix in ("", "staging/"):
            settings = settings_of(redis_url, prefix)
            async with AsyncFleet(settings=settings) as fleet:
                assert await fleet.runs.purge(dry_run=True) == 1
                assert (await fleet.overview()).active == 1
                again = await fleet.submit(agent, "not paused")
                async with InlineWorker(settings, [agent]) as worker:
                    await worker.finish(again)
                assert (await fleet.runs.result(again)).status == "completed"
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        names = {key.split("sf:")[0] for key in client.scan_iter("*sf:*")}
        assert names == set(PREFIXES)
        assert {key for key in client.scan_iter("*stepfleet") if "sf:" not in key} == {
            f"{prefix}stepfleet" for prefix in PREFIXES
        }


async def test_a_queue_follows_the_brokers_prefix_where_it_has_another(redis_url: str) -> None:
    settings = settings_of(redis_url, "dev:", broker_prefix="shop_")
    async with AsyncFleet(settings=settings) as fleet:
        await fleet.submit(Agent("clerk", model="openai:m"), "question")
        assert (await fleet.overview()).queue_length == 1
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        assert client.llen("shop_stepfleet") == 1
        assert all(key.startswith(("dev:sf:", "shop_")) for key in client.scan_iter("*"))


@pytest.mark.parametrize("prefix", ["dev", "{dev}:", "dev *:", "d\u00e9v:", "*:", "x" * 100 + ":"])
def test_a_prefix_that_could_meet_other_keys_is_refused(prefix: str) -> None:
    """CONF-04: `dev` would be a part of `dev2`; braces would move keys of a cluster."""
    with pytest.raises(ConfigurationError, match="field 'prefix'"):
        load_settings(prefix=prefix)
