"""Lets torchvision's Python half, and so timm, be imported beside a torch that lacks its compiled operators.

A CUDA build of torchvision next to a CPU build of torch fails at import with ``operator torchvision::nms does not
exist``. Nothing in timm calls these operators, but torchvision registers fake kernels for them while it is imported.
Declaring their schemas first is enough. Where the compiled operators load, this module does nothing.

``timm-knapsack doctor --fix`` copies this very file into one environment's site-packages, where `install_hook` runs at
start-up; so it imports nothing of this package.
"""

import importlib.util
import sys
from pathlib import Path

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
OPERATORS = ("nms", "qnms")

_declared = []  # torch.library.Library objects: the schemas live as long as these do


def operators_are_missing() -> bool:
    """True if torchvision is installed but its compiled library can't be loaded beside this torch."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    import torch

    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
            return False
        except OSError:
            continue
    return True


class _BeforeTorchvision:
    """An import hook that declares the operators when torchvision is about to be imported, and then removes itself."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            if self in sys.meta_path:  # find_spec is also called by those who only ask, in any thread
                sys.meta_path.remove(self)
            declare_missing_operators()
        return None


def install_hook() -> None:
    """Declare the operators only when something imports torchvision: start-up costs nothing."""
    if not any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())


def declare_missing_operators() -> bool:
    """Declare the schemas that torchvision expects; True if any had to be declared."""
    if _declared:
        return True
    if "torchvision" in sys.modules or not operators_are_missing():
        return False
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + SCHEMA)
    _declared.append(library)
    return True
