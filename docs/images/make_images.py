"""The pictures of README and docs (`make images`): a quickstart's chart, and pages as headless Chromium shows them.

    python docs/images/make_images.py quickstart/model site
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --hide-scrollbars".split()
HERE = Path(__file__).resolve().parent


def screenshot(page: Path, picture: Path, width: int, height: int, dark: bool = False) -> None:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        sys.exit("no chromium; `make test-browser` installs Debian's")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    with tempfile.TemporaryDirectory() as profile:
        options = [f"--user-data-dir={profile}", scheme, f"--window-size={width},{height}", f"--screenshot={picture}"]
        command = [program, *FLAGS, *options, page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=180)
    small(picture)


def small(picture: Path) -> None:
    """A palette of 256 colours: a third of the bytes. With fewer, thin lines turn grey."""
    Image.open(picture).convert("RGB").quantize(256).save(picture, optimize=True)


if __name__ == "__main__":
    model, site = map(Path, sys.argv[1:])
    shutil.copyfile(model / "accuracy_macs.png", HERE / "quickstart.png")
    small(HERE / "quickstart.png")
    screenshot(model / "report.html", HERE / "report.png", 1280, 900)
    screenshot(site / "index.html", HERE / "docs.png", 1280, 800)
    for file in sorted(HERE.glob("*.png")):
        print(file, f"{file.stat().st_size // 1024} kB")
