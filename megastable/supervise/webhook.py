"""Posts a notice to a webhook: MEGASTABLE_WEBHOOK=URL python -I webhook.py SECONDS < NOTICE.json

Slack and similar services show the notice's "text", with &, < and > escaped as they require. No answer within SECONDS,
a redirect or a status of 400 and more is a failure: code 1, and why on standard output. Standard library only, to start
quickly. The response is not reported: it may quote the address, which is a password.
"""

from __future__ import annotations

import html
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from http.client import HTTPException, responses


class Straight(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a POST would arrive as a GET, or loop."""

    def redirect_request(self, *_: object) -> None:
        return None


def post(url: str, body: bytes) -> str:
    """Why it failed, or ""."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json; charset=utf-8"})
    try:
        with urllib.request.build_opener(Straight).open(request):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            if 300 <= error.code < 400:
                return f"answered {error.code}: it has moved; give the address it moved to"
            return f"answered {error.code} {responses.get(error.code, '')}".strip()
    except urllib.error.URLError as error:
        return f"could not be reached: {error.reason}"
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    except (HTTPException, ValueError) as error:
        return f"no answer in HTTP ({type(error).__name__})"


if __name__ == "__main__":
    # The parent enforces the time limit; this is for when the parent is gone.
    signal.alarm(int(float(sys.argv[1])) + 2)
    notice = json.load(sys.stdin)
    # Else <!channel> or <https://...|text> written into the data would act on the receivers.
    notice["text"] = html.escape(notice["text"], quote=False)
    problem = post(os.environ["MEGASTABLE_WEBHOOK"], json.dumps(notice).encode())
    sys.stdout.buffer.write(problem.encode(errors="replace"))
    sys.exit(1 if problem else 0)
