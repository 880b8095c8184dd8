"""Names the person who runs a command."""

from __future__ import annotations

import getpass


def login_name() -> str:
    """Their login name; "somebody" where the system knows none, as in containers with a bare user id."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # Python 3.13 raises OSError alone
        return "somebody"
