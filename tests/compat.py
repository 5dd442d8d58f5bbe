"""`make compat`: the fast tests with the oldest versions that pyproject.toml admits, beside the pinned torch.

    python tests/compat.py .venv-compat

torch and torchvision stay at what constraints.txt pins; everything else is what pip finds beside them. What came of it
is in docs/reliability.md.
"""

import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = ("timm", "accelerate", "huggingface-hub", "datasets", "safetensors", "typer")


def lower_bounds() -> dict[str, str]:
    """``{package: least version}`` of the packages that are tried."""
    text = (ROOT / "pyproject.toml").read_text()
    found = dict(re.findall(r'^    "([\w-]+)>=([\d.]+)",$', text, re.MULTILINE))
    return {name: found[name] for name in OLDEST}


def main(folder: str) -> int:
    oldest = lower_bounds()
    print("oldest:", ", ".join(f"{name} {version}" for name, version in oldest.items()), flush=True)
    venv.create(folder, with_pip=True, clear=True)
    python = str(Path(folder) / "bin" / "python")
    pinned = ("torch==2.13.0", "torchvision==0.28.0")
    exact = [f"{name}=={version}" for name, version in oldest.items()]
    test = "pytest>=8.2 pytest-xdist hypothesis matplotlib scikit-learn nbclient nbformat ipykernel".split()
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*pip, *pinned, *exact, *test, "-e", f"{ROOT}[onnxruntime]"]).returncode:
        return 1
    subprocess.run([python, "-m", "timm_knapsack", "doctor", "--fix"], check=True)
    leave_out = "not browser and not slow"
    return subprocess.run([python, "-m", "pytest", "-n", "2", "-m", leave_out, str(ROOT / "tests")]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ".venv-compat"))
