"""The pictures of README and docs (`make images`): a quickstart's chart, and pages as headless Chromium shows them.

    python docs/images/make_images.py quickstart/model site
"""

import functools
import http.server
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --hide-scrollbars".split()
HERE = Path(__file__).resolve().parent


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder while it is served: from a file, the search of the docs is hidden."""
    handler = functools.partial(QuietHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def screenshot(address: str, picture: Path, width: int, height: int, dark: bool = False) -> None:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        sys.exit("no chromium; `make test-browser` installs Debian's")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    with tempfile.TemporaryDirectory() as profile:
        options = [f"--user-data-dir={profile}", scheme, f"--window-size={width},{height}", f"--screenshot={picture}"]
        command = [program, *FLAGS, *options, address]
        subprocess.run(command, check=True, capture_output=True, timeout=180)
    small(picture)


def small(picture: Path) -> None:
    """A palette of 256 colours: a third of the bytes. With fewer, thin lines turn grey."""
    Image.open(picture).convert("RGB").quantize(256).save(picture, optimize=True)


if __name__ == "__main__":
    model, site = map(Path, sys.argv[1:])
    shutil.copyfile(model / "accuracy_macs.png", HERE / "quickstart.png")
    small(HERE / "quickstart.png")
    screenshot((model / "report.html").resolve().as_uri(), HERE / "report.png", 1280, 900)
    with served(site) as address:
        screenshot(f"{address}/index.html", HERE / "docs.png", 1280, 800)
    for file in sorted(HERE.glob("*.png")):
        print(file, f"{file.stat().st_size // 1024} kB")
