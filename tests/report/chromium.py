"""A real browser for tests: headless Chromium, driven over a pipe by its DevTools protocol, with no network."""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
    *("--no-first-run", "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND"),
]
WAIT = 60


def program() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    def __init__(self, home: Path) -> None:
        self.home, self.downloads = home, home / "downloads"
        self.downloads.mkdir()
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
        command = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", program(), *OPTIONS, f"--user-data-dir={home / 'profile'}"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(home)},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._rest, self.events = 0, b"", []
        where = {"behavior": "allow", "downloadPath": str(self.downloads), "eventsEnabled": True}
        self.call("Browser.setDownloadBehavior", **where)

    def call(self, method, session=None, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        answer = self.wait(lambda m: m.get("id") == self._number)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def wait(self, wanted):
        """The first message that is wanted, of those that have come or will; the others are kept."""
        until = time.monotonic() + WAIT
        while True:
            for place, message in enumerate(self.events):
                if wanted(message):
                    return self.events.pop(place)
            ready, _, _ = select.select([self._in], [], [], max(0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            *parts, self._rest = (self._rest + os.read(self._in, 1 << 16)).split(b"\0")
            self.events += [json.loads(part) for part in parts]

    def open(self, path: Path, **look) -> "Page":
        return Page(self, path, **look)

    def close(self) -> None:
        self.call("Browser.close")
        self._process.wait(WAIT)
        os.close(self._in)
        os.close(self._out)


class Page:
    def __init__(self, browser: Chromium, path: Path, width=1000, height=900, dark=False, media="screen") -> None:
        self.browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=media, features=scheme)
        self.go(path)

    def go(self, path: Path) -> None:
        self.call("Page.navigate", url=path.as_uri())
        self.browser.wait(lambda m: self._is(m, "Page.loadEventFired"))

    def call(self, method, **parameters):
        return self.browser.call(method, self.session, **parameters)

    def run(self, script):
        """The value of an expression, or of the promise that it gives."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, *keys):
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def download(self, button):
        """The file that a button saves."""
        self.run(f"document.getElementById({button!r}).click()")
        began = self.browser.wait(lambda m: m.get("method") == "Browser.downloadWillBegin")["params"]
        done = {"guid": began["guid"], "state": "completed"}.items()
        self.browser.wait(lambda m: m.get("method") == "Browser.downloadProgress" and done <= m["params"].items())
        saved = self.browser.downloads / began["suggestedFilename"]
        return saved.rename(saved.with_stem(f"{saved.stem}-{began['guid']}"))  # the next one may have the same name

    @property
    def requests(self):
        """Addresses that the page asked for."""
        sent = [m for m in self.browser.events if self._is(m, "Network.requestWillBeSent")]
        return [m["params"]["request"]["url"] for m in sent]

    @property
    def problems(self):
        """What the page's scripts or the browser complained about."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [m["params"] for m in self.browser.events if any(self._is(m, kind) for kind in kinds)]

    def _is(self, message, method):
        return message.get("method") == method and message.get("sessionId") == self.session
