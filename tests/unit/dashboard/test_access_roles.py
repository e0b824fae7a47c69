import pytest

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.dashboard.access import AccessRole, AccessRoles, check_access, users_of
from stepfleet.orchestrator.settings.settings import load_settings

ROLES = AccessRoles(
    operators=("ann@x.org", "root", "kim", "ros"),
    approvers=("*@x.org",),
    viewers=("*@y.org", "bob@x.org"),
)


@pytest.mark.parametrize(
    ("user", "role"),
    [
        ("ann@x.org", AccessRole.OPERATOR),
        ("Ann@X.org", AccessRole.OPERATOR),
        ("root", AccessRole.OPERATOR),
        ("bob@x.org", AccessRole.APPROVER),  # the highest counts
        ("cat@y.org", AccessRole.VIEWER),
        ("eve@z.org", None),
        ("eve@evilx.org", None),
        ("eve@x.org.evil", None),
        ("x.org", None),
        ("ann@x.org@z.org", None),
        ("@x.org", None),
        ("eve@z.org@x.org", None),
        ("\N{KELVIN SIGN}im", None),
        ("ro\N{LATIN SMALL LETTER LONG S}", None),
        ("KIM", AccessRole.OPERATOR),
        ("", None),
        (None, None),
    ],
)
def test_a_users_role_is_the_highest_of_the_lists_that_name_them(
    user: str | None, role: AccessRole | None
) -> None:
    assert ROLES.of(user) is role


def test_without_lists_all_are_operators_and_a_star_means_all_that_are_known() -> None:
    assert AccessRoles().of("anybody") is AccessRole.OPERATOR
    assert AccessRoles().of(None) is AccessRole.OPERATOR
    open_to_all = AccessRoles(viewers=("*",))
    assert open_to_all.of("anybody") is AccessRole.VIEWER
    assert open_to_all.of(None) is None


@pytest.mark.parametrize(
    ("basic_auth", "problem"),
    [
        (None, "roles need users"),
        ("root:a", None),
        ("root:a\neve:b", "user 'eve'"),
        ("root:a\nann@x.org:b", None),
    ],
)
def test_users_who_could_do_nothing_are_refused_before_flower_starts(
    basic_auth: str | None, problem: str | None
) -> None:
    AccessRoles().check(basic_auth)
    if problem is None:
        ROLES.check(basic_auth)
    else:
        with pytest.raises(ConfigurationError, match=problem):
            ROLES.check(basic_auth)


def test_each_line_of_basic_auth_is_a_user() -> None:
    assert users_of("ann:a,b c\n\nbob:d:e\n") == ["ann:a,b c", "bob:d:e"]
    assert users_of(None) == []
    check_access("0.0.0.0", "ann:a\nbob:b")  # noqa: S104 - the address that it is about
    with pytest.raises(ConfigurationError, match="USER:PASSWORD"):
        check_access("127.0.0.1", "ann:a\nbob")


@pytest.mark.parametrize(
    ("basic_auth", "problem"),
    [
        ("ann:A,bob:B", "one USER:PASSWORD a line in STEPFLEET_FLOWER_BASIC_AUTH"),
        ("ann:A\nbob:пароль", "not ASCII"),
        ("jürgen:A", "not ASCII"),
    ],
)
def test_users_whom_flower_would_take_for_others_are_refused(basic_auth: str, problem: str) -> None:
    check_access("127.0.0.1", "ann:A,b\nbob:B:c,d")
    with pytest.raises(ConfigurationError, match=problem) as refused:
        check_access("127.0.0.1", basic_auth)
    assert not any(word in refused.value.message for word in ("пароль", "bob:B"))


def test_lists_come_from_the_environment_and_wrong_names_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STEPFLEET_FLOWER_OPERATORS", '["ann", "*@x.org", "*"]')
    settings = load_settings()
    assert settings.flower_operators == ("ann", "*@x.org", "*")
    assert settings.environment()["STEPFLEET_FLOWER_OPERATORS"] == '["ann", "*@x.org", "*"]'
    for wrong in ("", "*x.org", "a*", "*@", "*@*", " ann"):
        with pytest.raises(ConfigurationError, match=r"flower_viewers.*\*@domain"):
            load_settings(flower_viewers=[wrong])
