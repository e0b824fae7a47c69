import pytest

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.dashboard.access import check_access, host_of, is_loopback


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"])
def test_this_machines_own_addresses_need_no_authentication(address: str) -> None:
    assert is_loopback(address)
    check_access(address, None)


@pytest.mark.parametrize("address", ["0.0.0.0", "", "::", "192.168.1.5", "example.org"])  # noqa: S104
def test_any_other_address_is_refused_without_authentication(address: str) -> None:
    check_access(address, "me:secret")
    with pytest.raises(ConfigurationError, match="--basic-auth"):
        check_access(address, None)


@pytest.mark.parametrize("given", ["", "me", "me:", ":secret"])
def test_half_of_an_authentication_is_none(given: str) -> None:
    with pytest.raises(ConfigurationError, match="USER:PASSWORD"):
        check_access("127.0.0.1", given)


@pytest.mark.parametrize(
    ("header", "host"),
    [("localhost:5555", "localhost"), ("[::1]:5555", "::1"), ("evil.test", "evil.test"), ("", "")],
)
def test_the_host_header_is_read_without_its_port(header: str, host: str) -> None:
    assert host_of(header) == host


def test_a_name_that_only_begins_like_this_machine_is_not_this_machine() -> None:
    assert not is_loopback("127.0.0.1.evil.test")
    assert not is_loopback("localhost.evil.test")
