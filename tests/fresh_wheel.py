"""`make release`: the built wheel alone in a new virtual environment, and the first page of the README there.

    python tests/fresh_wheel.py dist

tests/test_release.py checks the same files beside the packages of this environment, in seconds; here pip resolves and
installs what the wheel declares (with the pins of constraints.txt), which takes minutes.
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(dist: str) -> None:
    [wheel] = Path(dist).resolve().glob("*.whl")
    first = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder) / "venv", with_pip=True)
        programs = Path(folder) / "venv" / "bin"
        away = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

        def run(*command: str) -> str:
            done = subprocess.run(command, cwd=folder, env=away, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                sys.exit(f"{' '.join(command)} ended with {done.returncode}")
            return done.stdout

        print("installing into an empty environment: minutes", flush=True)
        pip = f"{programs}/python -m pip install --quiet --disable-pip-version-check -c {ROOT}/constraints.txt"
        run(*pip.split(), str(wheel))
        print(run(f"{programs}/timm-knapsack", "--version").strip())
        print(run(f"{programs}/timm-knapsack", "doctor").splitlines()[-1])
        print(run(f"{programs}/python", "-c", first).strip())
        where = run(f"{programs}/python", "-c", "import timm_knapsack; print(timm_knapsack.__file__)").strip()
        if not where.startswith(folder):
            sys.exit(f"that was not the wheel but {where}")
        print(run(f"{programs}/timm-knapsack", "groups", "resnet50").splitlines()[-1])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "dist")
