"""Makes timm know this package's models when timm is imported, not before: ``import timm_knapsack`` stays light.

``timm.create_model("resnet50_knapsack_2g")`` must work after ``import timm_knapsack``, in whatever order the two are
imported. Registering needs timm, timm needs torch, and both together take seconds that ``timm-knapsack --help`` or a
script that only reads a channel config has no use for. So, where timm is not imported yet, a finder waits at the head
of ``sys.meta_path`` until it is:

- it finds timm as the other finders do and returns their spec, so that timm is loaded by its real loader;
- it adds one step to that loader: when timm has been executed, our models are imported, which registers them;
- then it removes itself from ``sys.meta_path``. An import of timm that fails leaves it there for the next try, and
  where there is no timm, the import fails as it does without us.

Looking for timm without importing it (``importlib.util.find_spec``) changes nothing. Each process has its own finder:
a spawned one imports this package again before it needs our models.

Registering imports most of the rooms ``slim`` and ``models``. None of their modules may be half imported at that time,
so in these two timm is imported at the top of ``models/__init__.py`` and nowhere before (a test reads the files).

torchvision's missing operators are declared in the same way, just before it is imported (`_torchvision_operators`).
"""

import importlib
import sys
import threading
from importlib.abc import MetaPathFinder

from . import _torchvision_operators

MODELS = (".models.cifar_resnet", ".models.pruned_models")  # in this order: a pruned model's base may be a CIFAR ResNet


def register_models() -> None:
    """Import the modules that register our models; timm is imported with them."""
    for module in MODELS:
        importlib.import_module(module, __package__)


def register_with_timm() -> None:
    """Register our models at once if timm is there, otherwise as soon as it is imported."""
    if "torchvision" not in sys.modules:
        _torchvision_operators.install_hook()
    if sys.modules.get("timm") is not None:
        register_models()
    elif not any(isinstance(finder, AfterTimm) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterTimm())


class AfterTimm(MetaPathFinder):
    """Finds timm where the other finders do, and has our models registered when it has been executed."""

    def __init__(self):
        self.searching = threading.local()  # another package's finder may ask all finders, and so this one again

    def find_spec(self, name, path=None, target=None):
        if name != "timm" or getattr(self.searching, "now", False):
            return None
        self.searching.now = True
        try:
            others = (f for f in list(sys.meta_path) if f is not self and hasattr(f, "find_spec"))
            spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        finally:
            self.searching.now = False
        if spec is not None and spec.loader is not None:
            self._add_step(spec.loader)
        return spec

    def _add_step(self, loader) -> None:
        execute = loader.exec_module

        def exec_module(module):
            execute(module)
            del loader.exec_module  # the loader is as it was: reloading timm does not come here
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            register_models()

        loader.exec_module = exec_module
