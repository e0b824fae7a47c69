"""A batch's progress is the sum of its shards' counters."""

from datetime import UTC, datetime

from stepfleet.orchestrator.records.batch import Manifest, progress_of

AT = datetime(2026, 1, 2, tzinfo=UTC)
MANIFEST = Manifest(batch_id="b", key="k", digest="d", created=AT, total=6, rows=7, sealed=True)


def test_a_manifest_reads_back_what_it_stores() -> None:
    stored = {**MANIFEST.to_fields(), "created": str(int(AT.timestamp() * 1000)), "sealed": "1"}
    assert Manifest.from_fields("b", stored) == MANIFEST


def test_counters_are_added_over_shards() -> None:
    progress = progress_of(
        MANIFEST,
        [
            {"total": "3", "open": "1", "status:queued": "1", "status:completed": "2", "cost": "5"},
            {},
            {
                "status:completed": "1",
                "status:failed": "1",
                "status:stopped": "1",
                "reason:error": "1",
                "reason:completed": "0",
                "steps": "4",
                "cost": "250000000",
                "lost": "1",
            },
        ],
    )
    assert (progress.completed, progress.failed, progress.stopped) == (3, 1, 1)
    assert (progress.done, progress.open) == (5, 1)
    assert progress.by_reason == {"error": 1}
    assert progress.cost_usd == 0.250000005
    assert progress.steps == 4
    assert progress.lost == 1
    assert progress.share == 5 / 6
    assert not progress.ended
    assert not progress.ok


def test_only_a_sealed_batch_whose_runs_all_completed_is_ok() -> None:
    done = [{"total": "6", "status:completed": "6"}]
    assert progress_of(MANIFEST, done).ok
    assert not progress_of(MANIFEST.model_copy(update={"sealed": False}), done).ok
    assert not progress_of(
        MANIFEST, [{"total": "6", "status:completed": "5", "status:stopped": "1"}]
    ).ok


def test_what_is_past_retention_is_said_and_takes_nothing_from_the_numbers() -> None:
    final = {"total": 6, "open": 0, "status:completed": 6, "cost": 3_000_000_000, "steps": 6}
    ended = MANIFEST.model_copy(update={"final": final})
    progress = progress_of(ended, [{}, {}])
    assert (progress.completed, progress.cost_usd, progress.past_retention) == (6, 3.0, 6)
    assert progress.ended
    assert not progress.ok
    # Those of an older version expired one by one, and nobody had noted what they came to.
    partly = progress_of(MANIFEST, [{"total": "2", "status:completed": "2"}])
    assert (partly.completed, partly.past_retention, partly.ok) == (2, 4, False)
