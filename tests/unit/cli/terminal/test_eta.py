from stepfleet.orchestrator.cli.terminal.progress import WINDOW_SECONDS, Pace, Sample


def test_a_single_sample_tells_no_rate_and_no_end() -> None:
    pace = Pace().with_sample(Sample(at=100.0, done=0, steps=0))

    assert pace.steps_per_second == 0
    assert pace.eta_seconds(10) is None


def test_the_end_is_what_is_open_over_the_rate_of_ended_runs() -> None:
    pace = Pace().with_sample(Sample(100.0, 0, 0)).with_sample(Sample(110.0, 20, 50))

    assert pace.steps_per_second == 5.0
    assert pace.eta_seconds(40) == 20.0


def test_nothing_open_takes_no_time() -> None:
    assert Pace().eta_seconds(0) == 0.0


def test_samples_older_than_the_window_do_not_count() -> None:
    pace = Pace().with_sample(Sample(0.0, 0, 0)).with_sample(Sample(10.0, 1000, 1000))
    pace = pace.with_sample(Sample(10.0 + WINDOW_SECONDS, 1030, 1030))

    assert pace.steps_per_second == 1.0


def test_runs_that_are_taken_up_again_make_no_negative_rate() -> None:
    pace = Pace().with_sample(Sample(0.0, 10, 10)).with_sample(Sample(1.0, 5, 5))

    assert pace.steps_per_second == 0
    assert pace.eta_seconds(5) is None
