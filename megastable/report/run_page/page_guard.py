"""Keeps others out of a served page: foreign web sites, and whoever does not have its token.

A page on a loopback address is protected from other machines, not from web sites that the same browser shows: one that
lets its own name point to 127.0.0.1 (DNS rebinding) is told by the Host header. Elsewhere a token is needed: once in
the address, from then on in a cookie.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

COOKIE = "megastable"
NAMES = ("localhost", "127.0.0.1", "[::1]")

# Of the page itself. uPlot sets its styles by script, which a policy allows.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; frame-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
# Of an incident's files: no script, whatever they hold.
INCIDENT_POLICY = (
    "sandbox allow-same-origin; default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
}  # fmt: skip


@dataclass(frozen=True)
class PageGuard:
    """loopback: whether only this machine can connect. token: "" if none is needed. port: its own, so that two pages of
    one machine do not share a cookie."""

    loopback: bool
    token: str
    port: int

    @property
    def cookie(self) -> str:
        return f"{COOKIE}-{self.port}"

    def refusal(self, headers: Mapping[str, str], query: Mapping[str, str]) -> tuple[int, str] | None:
        """Why a request is not answered: a status and a sentence; None if it is."""
        if self.loopback and host_of(headers.get("host", "")) not in NAMES:
            return 421, "This page is served as localhost only: open it by that name.\n"
        site = headers.get("sec-fetch-site", "none")
        if site == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return 403, "Other web sites may not read this page.\n"
        if self.token and not (self.same(query.get("token", "")) or self.same(self._cookie(headers))):
            return 401, "This page needs its token: open the address that `megastable watch` has printed.\n"
        return None

    def same(self, given: str) -> bool:
        """Compare with the token in constant time."""
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def _cookie(self, headers: Mapping[str, str]) -> str:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return ""
        return "" if found is None else found.value


def host_of(header: str) -> str:
    """The name in a Host header, without the port."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[: name.find("]") + 1]
    return name.rpartition(":")[0] if ":" in name else name


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address that is listened on."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
