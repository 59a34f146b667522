"""A real Chromium without a window, driven over its debugging pipe: no driver, no library, nothing but the browser.

with Chromium() as browser:
    page = browser.open(url)
    page.wait("document.title === 'lora-sync-proxy'")

The protocol: https://chromedevtools.github.io/devtools-protocol/; over the pipe, messages end with a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_ANSWER_S = 20
_STOP_S = 10
_POLL_S = 0.05

_FLAGS = [
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # in containers, tests run as root; the page comes from this machine
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--lang=en-GB",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


class Chromium:
    """One browser process with a profile of its own."""

    def __enter__(self) -> Self:
        assert PROGRAM is not None
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # Chromium reads from 3 and writes to 4. A shell puts them there: Python's own descriptors may be just these.
        script = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, PROGRAM, *_FLAGS, f"--user-data-dir={self._profile.name}"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands)
        os.close(answers)
        self._unread = b""
        self._serial = 0
        self._pages: dict[str, Page] = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(AssertionError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        self._profile.cleanup()

    def open(self, url: str, *, width: int = 1280, dark: bool = False, password: str | None = None) -> Page:
        """Open a page of this width, in pixels, and wait until it has loaded.

        When the server asks for a password, `password` is typed in; a second time, or without one, the question is
        cancelled.
        """
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, password)
        for domain in ("Page", "Runtime", "Log", "Network", "Audits", "Accessibility"):
            page.call(f"{domain}.enable")
        if password is not None:
            page.call("Fetch.enable", handleAuthRequests=True)
        page.look(width=width, dark=dark)
        page.call("Page.navigate", url=url)
        page.wait("document.readyState === 'complete'")
        return page

    def call(self, method: str, *, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send one command and return its result; what the browser tells meanwhile goes to the pages."""
        serial = self.tell(method, session=session, **params)
        for heard in self._messages(time.monotonic() + _ANSWER_S):
            if heard.get("id") == serial:
                assert "error" not in heard, f"{method}: {heard['error']}"
                result: dict[str, Any] = heard["result"]
                return result
            if "method" in heard and (page := self._pages.get(heard.get("sessionId", ""))) is not None:
                page.heard(heard["method"], heard["params"])
        raise AssertionError(f"Chromium did not answer {method} within {_ANSWER_S} s")

    def tell(self, method: str, *, session: str | None = None, **params: Any) -> int:
        """Send one command without waiting for its result. Return its number."""
        self._serial += 1
        message: dict[str, Any] = {"id": self._serial, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        return self._serial

    def _messages(self, deadline: float) -> Iterator[dict[str, Any]]:
        while True:
            while b"\0" in self._unread:
                one, self._unread = self._unread.split(b"\0", 1)
                yield json.loads(one)
            if not select.select([self._answers], [], [], max(deadline - time.monotonic(), 0))[0]:
                return
            piece = os.read(self._answers, 1 << 16)
            assert piece, f"Chromium has ended with status {self._process.poll()}"
            self._unread += piece


class Page:
    """One page, and everything about it that a careful visitor would complain of."""

    def __init__(self, browser: Chromium, session: str, password: str | None = None) -> None:
        self._browser = browser
        self._session = session
        self._password = password
        self._asked: set[str] = set()
        self.problems: list[str] = []
        """Errors and warnings in its console, exceptions, violations of its policy, and issues that Chromium found."""
        self.hosts: set[str] = set()
        """Every host and port that it has sent a request to."""

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol to this page."""
        return self._browser.call(method, session=self._session, **params)

    def heard(self, method: str, params: dict[str, Any]) -> None:
        """Take in what the browser tells of this page."""
        match method:
            case "Runtime.exceptionThrown":
                self.problems.append(f"exception: {params['exceptionDetails']}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(f"console: {[one.get('value') for one in params['args']]}")
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"log: {params['entry']['text']} {params['entry'].get('url', '')}")
            case "Audits.issueAdded":
                self.problems.append(f"issue: {params['issue']}")
            case "Fetch.requestPaused":
                self._browser.tell("Fetch.continueRequest", session=self._session, requestId=params["requestId"])
            case "Fetch.authRequired":
                self._log_in(params["requestId"])
            case "Network.requestWillBeSent":
                self.hosts.add(urlsplit(params["request"]["url"]).netloc)

    def _log_in(self, request: str) -> None:
        answer: dict[str, str] = {"response": "CancelAuth"}
        if request not in self._asked and self._password is not None:
            answer = {"response": "ProvideCredentials", "username": "anybody", "password": self._password}
        self._asked.add(request)
        self._browser.tell(
            "Fetch.continueWithAuth", session=self._session, requestId=request, authChallengeResponse=answer
        )

    def look(self, *, width: int, dark: bool) -> None:
        """Give it another width or theme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait(self, expression: str, *, limit_s: float = 10) -> None:
        """Return as soon as the expression is true; fail when it is not by the limit."""
        deadline = time.monotonic() + limit_s
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"not within {limit_s} s: {expression}\n{self.text()}"
            time.sleep(_POLL_S)

    def text(self) -> str:
        """Return what it shows, as text."""
        text: str = self.evaluate("document.body.innerText")
        return text

    def press(self, key: str) -> None:
        """Press and release a key, such as Tab."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode={"Tab": 9}[key])

    def close(self) -> None:
        """Close it."""
        self.call("Page.close")

    def screenshot(self, path: Path) -> None:
        """Save the whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(image))
