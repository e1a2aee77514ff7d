"""Make the pictures of the page that the documents show.

    python docs/images/report.py

Predicts GPT-3 175B on 64 A100 in 8 stages, writes its page, and photographs it in a headless Chromium.
"""

import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from autopar.degrees import Degrees  # noqa: E402
from autopar.page import look, write_page  # noqa: E402
from autopar.prediction import predict  # noqa: E402
from tests.browser import browser_path, open_browser  # noqa: E402

SHOTS = (("report_light", 1280, 1700, False, "body"), ("report_dark", 400, 1180, True, "#graph"))
"""Name, width and height in pixels, whether it is dark, and what is at the top."""

DRAWN = """new Promise((done) => {
  const look = () =>
    "ready" in document.documentElement.dataset && Bokeh.documents[0].is_idle ? done() : setTimeout(look, 50);
  look();
})"""
"""Waits until all charts are drawn."""


def main() -> None:
    """Write the pictures beside this file."""
    program = browser_path()
    if program is None:
        sys.exit("no Chromium: apt-get install chromium")
    degrees = Degrees(tp=8, pp=8, microbatch=1, global_batch=24, recompute="selective", sequence_parallel=True)
    plan = predict("zoo:gpt3-175b", degrees, cluster="a100").plan
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        write_page(look(plan), path)
        for name, width, height, dark, section in SHOTS:
            with open_browser(program) as page:
                page.open(path.as_uri(), width=width, height=height, dark=dark)
                page.evaluate(f"document.querySelector('{section}').scrollIntoView()")
                page.evaluate(DRAWN)
                time.sleep(3)  # frames that were asked for last
                page.screenshot(HERE / f"{name}.png", whole=False)


if __name__ == "__main__":
    main()
