"""Draw docs/images/report.png, the page of samples/fsdp-host-stall down to its timeline, in headless Chromium.

python -m docs.draw_report
"""

from __future__ import annotations

import base64
import shutil
import tempfile
from pathlib import Path

import counterpoint
from counterpoint.rendering.diagnosis_html import write_html
from tests.support.chromium import Chromium

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 1024


def main() -> None:
    """Write the picture."""
    result = counterpoint.diagnose(ROOT / "samples" / "fsdp-host-stall")
    with tempfile.TemporaryDirectory() as folder:
        write_html(page := Path(folder) / "report.html", result.diagnosis, result.lanes)
        browser = Chromium(shutil.which("chromium") or "google-chrome", Path(folder))
        tab = browser.open(page, width=WIDTH)
        end = browser.evaluate(tab, "document.querySelector('#timeline').getBoundingClientRect().bottom + scrollY")
        part = {"x": 0, "y": 0, "width": WIDTH, "height": end + 12, "scale": 1}
        drawn = browser.call("Page.captureScreenshot", tab, format="png", captureBeyondViewport=True, clip=part)
        browser.close()
    (ROOT / "docs" / "images" / "report.png").write_bytes(base64.b64decode(drawn["data"]))


if __name__ == "__main__":
    main()
