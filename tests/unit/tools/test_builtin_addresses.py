import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.errors import ToolArgumentsError
from stepfleet.orchestrator.tools.web import (
    Reach,
    checked_url,
    is_public,
    literal_address,
)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",  # noqa: S104 - an address to refuse
        "10.0.0.1",
        "100.64.0.1",
        "127.0.0.1",
        "127.255.255.254",
        "168.63.129.16",
        "169.254.169.254",
        "172.16.0.1",
        "192.0.0.8",
        "192.0.0.192",
        "192.31.196.1",
        "192.52.193.1",
        "192.175.48.1",
        "100.100.100.200",
        "169.254.170.2",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:168.63.129.16",
        "64:ff9b::a83f:8110",
        "2002:a83f:8110::",
        "2607:f8b0::5efe:7f00:1",
        "2607:f8b0::200:5efe:a9fe:a9fe",
        "2620:4f:8000::1",
        "fd00:ec2::254",
        "fd20:ce::254",
        "::ffff:127.0.0.1",
        "::ffff:8.8.8.8",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "100::1",
        "2001::1",
        "2001:db8::1",
        "2002:7f00:1::",
        "3fff::1",
        "fc00::1",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
    ],
)
def test_addresses_that_are_not_on_the_public_internet_are_recognized(address: str) -> None:
    """TOOL-24: private, loopback, link-local, multicast, reserved, and IPv4 inside IPv6."""
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "2a00:1450:4001::1", "64:ff9b::808:808"],
)
def test_public_addresses_are_recognized(address: str) -> None:
    """TOOL-24"""
    assert is_public(ipaddress.ip_address(address))


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_inside_ipv6_is_never_more_public_than_alone(
    address: ipaddress.IPv4Address,
) -> None:
    """TOOL-24: property over the three ways to write one."""
    mapped = ipaddress.IPv6Address(int(ipaddress.IPv6Address("::ffff:0:0")) + int(address))
    sixth = ipaddress.IPv6Address((0x2002 << 112) + (int(address) << 80))
    translated = ipaddress.IPv6Address(int(ipaddress.IPv6Address("64:ff9b::")) + int(address))
    assert not is_public(mapped)
    assert not is_public(sixth)
    assert is_public(translated) == is_public(address)


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "017700000001",
        "0177.0.0.1",
        "127.1",
        "127.0.0.1.",
        "1.2.3.4.5",
        "256.1.1.1",
        "example.0x1",
        "08.8.8.8",
        "1:2",
    ],
)
def test_numbers_that_resolvers_take_for_addresses_are_refused(host: str) -> None:
    """TOOL-24: decimal, octal, hexadecimal and short forms."""
    with pytest.raises(ToolArgumentsError, match="is not a plain address"):
        literal_address(host)


def test_names_and_plain_addresses_are_distinguished() -> None:
    """TOOL-24"""
    assert literal_address("example.com") is None
    assert literal_address("1.example.x2") is None
    assert literal_address("8.8.8.8") == ipaddress.ip_address("8.8.8.8")
    assert literal_address("::1") == ipaddress.ip_address("::1")


def test_a_list_of_hosts_lets_only_those_through() -> None:
    """TOOL-24"""
    reach = Reach(("api.example.com", "*.example.org"))
    for host in ("api.example.com", "API.example.com.", "a.example.org", "a.b.example.org"):
        reach.check_host(host)
    for host in ("example.com", "example.org", "xapi.example.com", "evilexample.org", "8.8.8.8"):
        with pytest.raises(ToolArgumentsError, match=r"is not allowed; allowed are api\.example"):
            reach.check_host(host)


def test_one_private_address_among_public_ones_is_enough_to_refuse() -> None:
    """TOOL-24"""
    found = [ipaddress.ip_address(one) for one in ("8.8.8.8", "10.0.0.1")]
    with pytest.raises(
        ToolArgumentsError, match=r"leads to 10\.0\.0\.1, which is not on the public"
    ):
        Reach().check_addresses("mixed.example", found)
    Reach(("mixed.example",), allow_private=True).check_addresses("mixed.example", found)


def test_private_addresses_need_named_hosts() -> None:
    """TOOL-24: an explicit opt-in only."""
    with pytest.raises(ConfigurationError, match="allow_private needs hosts"):
        Reach(allow_private=True)
    with pytest.raises(ConfigurationError, match="'http://x/' is not a host"):
        Reach(("http://x/",))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://example.com/", "give an http:// or https:// address"),
        ("file:///etc/passwd", "give an http:// or https:// address"),
        ("example.com", "give an http:// or https:// address"),
        ("http://", "give an http:// or https:// address"),
        ("http://example.com:0/", "give an http:// or https:// address"),
        ("http://example.com:99999/", "is not valid"),
        ("http://[::1/", "is not valid"),
        ("http://user:secret@example.com/", "user name or password"),
        ("http://example.com\\@127.0.0.1/", "backslashes"),
        ("http://example.com/a b", "spaces"),
        ("http://example.com/\r\nHost: x", "control characters"),
        ("http://example.com/" + "x" * 9000, "longer than 8192 characters"),
        ("http://" + "ä" * 70 + ".com/", "not a valid name"),
    ],
)
def test_what_is_no_web_address_is_refused_with_the_fix(url: str, says: str) -> None:
    """TOOL-24"""
    with pytest.raises(ToolArgumentsError) as caught:
        checked_url(url)
    assert says in caught.value.message
    assert "secret" not in caught.value.message


def test_digits_of_other_scripts_end_as_plain_ones_before_they_are_judged() -> None:
    """TOOL-24"""
    assert checked_url("http://１２７.0.0.1:80/").hostname == "127.0.0.1"  # noqa: RUF001
