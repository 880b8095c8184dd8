"""Who gets an answer: names of the host, other sites, tokens."""

from __future__ import annotations

import pytest

from megastable.report.run_page.page_server import PageGuard, host_of, is_loopback

OPEN = PageGuard(loopback=True, token="", port=80)
CLOSED = PageGuard(loopback=False, token="secret-ü", port=80)


@pytest.mark.parametrize("host", ["localhost", "localhost:8765", "127.0.0.1:1", "[::1]:8765", "LOCALHOST:80"])
def test_names_of_this_machine(host: str) -> None:
    assert OPEN.refuse_request({"host": host}, {}) is None


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:8765",
        "localhost.evil.example",
        "127.0.0.1.evil.example:1",
        "[::2]:80",
        "[",
    ],
)
def test_a_foreign_name_that_points_here_is_refused(host: str) -> None:
    refused = OPEN.refuse_request({"host": host}, {})
    assert refused is not None and refused[0] == 421


def test_another_site_may_link_here_but_not_read() -> None:
    headers = {"host": "localhost", "sec-fetch-site": "cross-site"}
    assert OPEN.refuse_request({**headers, "sec-fetch-mode": "navigate"}, {}) is None
    refused = OPEN.refuse_request({**headers, "sec-fetch-mode": "no-cors"}, {})
    assert refused is not None and refused[0] == 403


def test_a_token_in_the_address_or_in_the_cookie() -> None:
    assert CLOSED.refuse_request({}, {"token": "secret-ü"}) is None
    with_token = PageGuard(loopback=False, token="abc", port=80)
    assert with_token.refuse_request({"cookie": "other=1; megastable-80=abc"}, {}) is None
    for headers, query in [
        ({}, {}), ({}, {"token": ""}), ({}, {"token": "ab"}), ({"cookie": "megastable-81=abc"}, {}),
        ({"cookie": "megastable-80="}, {}), ({"cookie": "\x00;;="}, {}), ({}, {"token": "\udc80"}),
    ]:  # fmt: skip
        refused = with_token.refuse_request(headers, query)
        assert refused is not None and refused[0] == 401


def test_addresses() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.8.9.1")] == [True] * 4
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "node-1", "")))
    assert host_of("a:b:c") == "a:b"
