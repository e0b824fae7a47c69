import io

from rich.console import Console

from stepfleet.orchestrator.cli import doctor as checks
from stepfleet.orchestrator.store.fleet.checks import State, warn


def test_an_old_python_fails() -> None:
    assert checks.python((3, 10, 4)).state is State.FAIL
    assert checks.python((3, 11, 0)).state is State.OK


def test_a_library_outside_its_bounds_is_named_with_both_versions() -> None:
    check = checks.libraries(["redis>=6,<9", "celery>=5.7"], {"redis": "9.0", "celery": "5.7.0"})

    assert check.state is State.FAIL
    assert "redis is 9.0" in check.found


def test_a_missing_library_fails_and_those_of_extras_do_not_count() -> None:
    check = checks.libraries(['flower>=2; extra == "flower"', "typer>=1"], {})

    assert check.found == "typer is missing"


def test_a_variable_of_no_effect_is_reported_with_what_may_be_meant() -> None:
    """CONF-05"""
    given = {
        "STEPFLEET_SLOTS": "1",
        "STEPFLEET_DATA": "x",
        "STEPFLEET_AGENT__OLD_CLERK__MAX_STEPS": "1",
        "HOME": "/",
    }
    assert checks.variables(given, ["slots"], ["old clerk"]).state is State.OK
    assert checks.variables(given, ["slots"], []).state is State.OK
    other = checks.variables({"STEPFLEET_SLOTZ": "1", **given}, ["slots"], ["clerk"])
    assert other.state is State.WARN
    assert "STEPFLEET_SLOTZ; did you mean 'STEPFLEET_SLOTS'?" in other.found
    assert "STEPFLEET_AGENT__OLD_CLERK__MAX_STEPS (no agent of that name)" in other.found


def test_few_open_files_for_many_slots_are_reported() -> None:
    assert checks.open_files(1024, slots=1000).state is State.WARN
    assert checks.open_files(65_536, slots=1000).state is State.OK
    assert checks.open_files(-1, slots=1000).state is State.OK


def test_a_library_is_found_however_its_name_is_spelled() -> None:
    assert (
        checks.libraries(["docstring-parser>=0.17"], {"docstring_parser": "0.18"}).state is State.OK
    )


def test_every_finding_about_this_machine_that_is_not_ok_names_a_fix() -> None:
    found = [
        checks.python((3, 8)),
        checks.libraries(["typer>=1"], {}),
        checks.worker_extra(["aiohttp"]),
        checks.open_files(10, slots=10),
        checks.variables({"STEPFLEET_X": ""}, [], []),
    ]

    assert all(check.fix for check in found)
    assert State.OK not in {check.state for check in found}


def test_what_workers_tell_moves_no_cursor_and_colours_nothing() -> None:
    """Names, versions and releases come from Redis, as whoever writes there wants them."""
    evil = "w1\x1b[2J\x9b31m\u202e@host"
    file = io.StringIO()
    Console(width=200, file=file).print(checks.table([warn(evil, f"found {evil}", f"stop {evil}")]))
    printed = file.getvalue()
    assert not {"\x1b", "\x9b", "\u202e"} & set(printed)
    assert printed.count("w1\N{REPLACEMENT CHARACTER}[2J") == 3
