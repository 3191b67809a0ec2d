"""Headless Chromium over its debugging pipe: opens a page and reports all it complained about and asked for."""

import contextlib
import json
import os
import select
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--remote-debugging-pipe",
)  # fmt: skip
TIMEOUT_S = 900.0  # a browser that hangs
SHOWN = """(() => {
  const canvas = document.querySelector(BOX + " canvas");
  canvas.scrollIntoView({ behavior: "instant", block: "center" });
  const hex = getComputedStyle(document.documentElement).getPropertyValue(COLOUR).trim();
  const wanted = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const pixels = [];
  for (let i = 0; i < data.length; i += 4) if (wanted.every((part, j) => data[i + j] === part)) pixels.push(i / 4);
  const first = pixels[0] || 0;
  const place = canvas.getBoundingClientRect();
  return [pixels.length, place.left + (first % canvas.width) + 1, place.top + Math.floor(first / canvas.width) + 1];
})()"""


@dataclass
class Page:
    session: str
    complaints: list[str] = field(default_factory=list)  # console warnings and errors, exceptions, CSP violations
    requests: list[str] = field(default_factory=list)  # every URL asked for but the page itself
    loaded: bool = False


class Chromium:
    """One browser process; commands go to its fd 3, answers come from its fd 4, messages end with NUL."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        command = [program, *FLAGS, f"--user-data-dir={profile}"]
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._log = (profile / "stderr.txt").open("wb")
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "chromium", *command],
            pass_fds=(to_browser, from_browser),
            stdout=self._log,
            stderr=self._log,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._next = b"", 0
        self._pages: dict[str, Page] = {}

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self.call("Browser.close")
        self._process.wait(timeout=TIMEOUT_S)
        os.close(self._commands)
        os.close(self._answers)
        self._log.close()

    def open(self, file: Path, *, width: int = 1280, height: int = 1600, dark: bool = False) -> Page:
        """Open a local file in a fresh tab of a size, and wait until it has loaded and settled."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        page = Page(self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        self._pages[page.session] = page
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", page)
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        self.call("Emulation.setDeviceMetricsOverride", page, **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", page, features=[scheme])
        self.call("Page.navigate", page, url=file.as_uri())
        self._pump_until(lambda: page.loaded)
        self.evaluate(page, "new Promise(done => requestAnimationFrame(() => setTimeout(done, 300)))")
        page.requests = [url for url in page.requests if url != file.as_uri()]
        return page

    def evaluate(self, page: Page, expression: str) -> Any:
        """The JSON value of an expression (a promise is awaited)."""
        answer = self.call("Runtime.evaluate", page, expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def shown(self, page: Page, box: str, colour: str) -> tuple[int, float, float]:
        """How many pixels of the first canvas in `box` have a colour of page.css, and where the topmost is."""
        found = self.evaluate(page, SHOWN.replace("BOX", json.dumps(box)).replace("COLOUR", json.dumps(colour)))
        return int(found[0]), float(found[1]), float(found[2])

    def move(self, page: Page, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", page, type="mouseMoved", x=x, y=y, button="none", buttons=0)
        self.evaluate(page, "new Promise(done => setTimeout(done, 200))")

    def drag(self, page: Page, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the left button at `start` and let it go at `end`."""
        for kind, (x, y) in (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
            self._press(page, kind, x, y, 1)
        self.evaluate(page, "new Promise(done => setTimeout(done, 200))")

    def double_click(self, page: Page, x: float, y: float) -> None:
        for clicks in (1, 2):
            self._press(page, "mousePressed", x, y, clicks)
            self._press(page, "mouseReleased", x, y, clicks)
        self.evaluate(page, "new Promise(done => setTimeout(done, 200))")

    def _press(self, page: Page, kind: str, x: float, y: float, clicks: int) -> None:
        where = {"x": x, "y": y, "button": "left", "buttons": 1, "clickCount": clicks}
        self.call("Input.dispatchMouseEvent", page, type=kind, **where)

    def call(self, method: str, page: Page | None = None, **params: Any) -> dict[str, Any]:
        self._next += 1
        number = self._next
        answer: dict[str, Any] = {}
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if page is not None:
            message["sessionId"] = page.session
        os.write(self._commands, json.dumps(message).encode() + b"\0")

        def answered() -> bool:
            return bool(answer)

        self._pump_until(answered, number, answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _pump_until(self, done: Any, number: int = -1, answer: dict[str, Any] | None = None) -> None:
        """Read messages until `done()`; the one that answers `number` lands in `answer`, events on their page."""
        deadline = time.monotonic() + TIMEOUT_S
        while not done():
            while b"\0" not in self._buffer:
                if not select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    raise RuntimeError(f"chromium did not answer within {TIMEOUT_S:.0f} s")
                block = os.read(self._answers, 1 << 20)
                if not block:
                    raise RuntimeError("chromium went away")
                self._buffer += block
            raw, self._buffer = self._buffer.split(b"\0", 1)
            message = json.loads(raw)
            if answer is not None and message.get("id") == number:
                answer.update(message)
            elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                _note(page, message.get("method", ""), message.get("params", {}))


def _note(page: Page, event: str, params: dict[str, Any]) -> None:
    if event == "Page.loadEventFired":
        page.loaded = True
    elif event == "Network.requestWillBeSent":
        page.requests.append(params["request"]["url"])
    elif event == "Runtime.exceptionThrown":
        page.complaints.append(str(params["exceptionDetails"]))
    elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
        page.complaints.append(str(params["args"]))
    elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
        page.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
