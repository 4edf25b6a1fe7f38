"""Pages in a headless Chromium: what its console says, and which texts lie on each other. Nothing is downloaded."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
)

# Written into a copy of the page: texts of every SVG whose boxes overlap or stick out, and the page's own width.
_PROBE = """
<script>
window.addEventListener("load", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
  const problems = [];
  for (const svg of document.querySelectorAll("svg")) {
    const frame = svg.getBoundingClientRect();
    const boxes = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
    boxes.forEach(([name, box], index) => {
      const inside = box.left > frame.left - 1 && box.right < frame.right + 1
        && box.top > frame.top - 1 && box.bottom < frame.bottom + 1;
      if (!inside)
        problems.push(`"${name}" sticks out of "${svg.getAttribute("aria-label")}"`);
      for (const [other, second] of boxes.slice(index + 1)) {
        const width = Math.min(box.right, second.right) - Math.max(box.left, second.left);
        const height = Math.min(box.bottom, second.bottom) - Math.max(box.top, second.top);
        if (width > 1 && height > 3)
          problems.push(`"${name}" lies on "${other}" in "${svg.getAttribute("aria-label")}"`);
      }
    });
  }
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) problems.push(`the page is ${root.scrollWidth} pixels wide`);
  const found = {problems, counts: {}};
  for (const name of ["svg", "figure", "table", "text"]) found.counts[name] = document.querySelectorAll(name).length;
  const note = document.createElement("pre");
  note.id = "found";
  note.textContent = JSON.stringify(found);
  document.body.append(note);
});
</script>
"""


@dataclass(frozen=True)
class Seen:
    """What a browser made of a page.

    Attributes:
        problems: texts on each other, or outside of their picture.
        counts: of elements by name.
        console: errors and warnings it wrote, failed loads among them.
    """

    problems: list[str]
    counts: dict[str, int]
    console: list[str]


def look_at(html: str, folder: Path) -> Seen:
    """Opens a page in Chromium."""
    assert CHROMIUM is not None
    page = folder / "page.html"
    page.write_text(html.replace("</body>", f"{_PROBE}</body>"), encoding="utf-8")
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--log-level=0",
            "--window-size=1120,900", f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found is not None, f"the page's script did not run: {done.stderr[-500:]}"
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Seen(console=console, **json.loads(unescape(found[1])))
