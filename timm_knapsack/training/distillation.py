"""Distillation: the student, its reconstruction matrices ``M_l`` and all losses as one trainable module.

``L = CE + λ_KD · KD + λ_IKD · IKD``, the fine-tuning loss of section 5 of the paper. Every term is a mean over the
batch, so that several processes with equal batches average to the same number as one.

- **CE**: cross-entropy with label smoothing; labels ``[B]`` or probabilities ``[B, classes]`` (mixup, cutmix). A label
  of -1 is none: such an image teaches through its teacher alone, and the mean is that of the labelled ones. Beside KD
  it is left out unless ``ce_weight`` is given, as the recipes of the paper do: with labels the student ends further
  from its teacher (docs/training.md).
- **KD**: ``-Σ_i softmax(teacher / T)_i · log softmax(student / T)_i · T²``; ``T = 1`` is the paper's equation.
- **IKD**: for every layer ``l`` the squared distance of the teacher's pre-activation map from ``M_l`` times the
  student's. The paper sums over positions, channels and layers; its published code takes the mean over the elements of
  each map and divides by the number of layers. ``ikd_reduction`` is ``"mean"`` (as the code, the default, with weights
  of 20 to 30) or ``"sum"`` (as the equation, and a mean over the batch).
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import TrainingError
from ..maps.batches import images_of
from ..maps.distance import class_scores, output_distance
from ..maps.stand_ins import folded_norms, standing_in
from ..maps.taps import Tap, find_taps, listen, makers_at
from ..maps.walk import watch_execution
from ..slim.channel_config import ChannelConfig
from ..slim.kept_channels import kept_of
from ..slim.modes import eval_mode
from .losses import SquaredDistance, ce_loss, kd_loss, project

_logger = logging.getLogger(__name__)


def check_number(name: str, value: Any, low: float, high: float = math.inf, *, whole: bool = False) -> None:
    """Refuse a config value that is no finite number in ``[low, high]``, naming it."""
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not (low <= value <= min(high, 1e300)):
        bounds = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise TrainingError(f"{name} must be a {'whole ' if whole else ''}number {bounds}, got {value!r}")


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Refuse a config value that is none of ``choices``, naming them."""
    if value not in tuple(choices):
        raise TrainingError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


@dataclass(frozen=True)
class DistillationConfig:
    """What the student learns from its teacher.

    Attributes:
        ce_weight: weight of the cross-entropy with the labels; 0 turns the term off, as images without labels do. None
            is 0 beside KD, whose teacher knows more of an image than its label, and 1 otherwise (`label_weight`).
        kd_weight: λ_KD; 0 turns the term off.
        temperature: ``T`` of KD; the term is scaled by ``T²``.
        ikd_weight: λ_IKD; 0 turns the term off (as the paper does for EfficientNet).
        ikd_at: ``"convs"`` (each conv, and each linear inside a block), ``"blocks"``, ``"stages"``, or module names.
            Blocks of a network that has none are its convs and linears before the last.
        ikd_reduction: ``"mean"`` over elements and layers (the published code), or ``"sum"`` (the paper's equation).
        ikd_init: ``M_l`` starts as the ``"ridge"`` solution on a few batches, or as the ``"selection"`` of the kept
            channels. Layers of equal width have no ``M_l``.
        ikd_init_batches: batches for the ridge solution.
        ikd_ridge: its regulariser, relative to the mean squared activation.
        ikd_weight_decay: weight decay of all ``M_l``; the student has its own.
        label_smoothing: of the cross-entropy; None is 0, or in `finetune` what follows from the run.

    Example:
        >>> DistillationConfig(kd_weight=1.0, ikd_weight=20.0, ikd_at="blocks").temperature
        1.0
    """

    kd_weight: float = 1.0
    ce_weight: float | None = None
    temperature: float = 1.0
    ikd_weight: float = 20.0
    ikd_at: str | tuple[str, ...] = "blocks"
    ikd_reduction: str = "mean"
    ikd_init: str = "ridge"
    ikd_init_batches: int = 8
    ikd_ridge: float = 1e-4
    ikd_weight_decay: float = 1e-4
    label_smoothing: float | None = None

    def __post_init__(self):
        for name in ("kd_weight", "ikd_weight", "ikd_weight_decay", "ikd_ridge"):
            check_number(name, getattr(self, name), 0)
        if self.ce_weight is not None:
            check_number("ce_weight", self.ce_weight, 0)
        check_number("temperature", self.temperature, 1e-3)
        if self.label_smoothing is not None:
            check_number("label_smoothing", self.label_smoothing, 0, 1)
        check_number("ikd_init_batches", self.ikd_init_batches, 1, whole=True)
        check_choice("ikd_reduction", self.ikd_reduction, ("mean", "sum"))
        check_choice("ikd_init", self.ikd_init, ("ridge", "selection"))
        if isinstance(self.ikd_at, str):
            if self.ikd_at not in ("convs", "blocks", "stages"):
                raise TrainingError(
                    f"ikd_at must be 'convs', 'blocks', 'stages' or a list of module names; got {self.ikd_at!r}"
                )
        elif isinstance(self.ikd_at, (list, tuple)) and self.ikd_at and all(isinstance(n, str) for n in self.ikd_at):
            object.__setattr__(self, "ikd_at", tuple(dict.fromkeys(self.ikd_at)))
        else:
            raise TrainingError(f"ikd_at must name at least one module, got {self.ikd_at!r}")

    @property
    def label_weight(self) -> float:
        """The weight of the cross-entropy, also where it is left open.

        Example:
            >>> DistillationConfig().label_weight, DistillationConfig(kd_weight=0).label_weight
            (0.0, 1.0)
        """
        if self.ce_weight is None:
            return 0.0 if self.kd_weight else 1.0
        return self.ce_weight


class Losses(NamedTuple):
    """What one forward returns: scalars (``kd`` and ``ikd`` without their weights) and the student's logits."""

    total: torch.Tensor
    ce: torch.Tensor
    kd: torch.Tensor
    ikd: torch.Tensor
    logits: torch.Tensor


class DistillationModule(nn.Module):
    """Student and all ``M_l`` in one module, so that one DDP wrapper and one optimiser see everything that learns.

    The teacher is not a submodule: it is neither trained, saved, wrapped, nor put into ``train()``. It runs in ``eval``
    mode without gradients, under the caller's autocast, and moves along with ``.to(device)``. Hooks exist only while
    ``forward`` runs, so ``.student`` is an ordinary model at any other time: it pickles, deep-copies and saves.

    Args:
        student: the slim model; the same module names as the teacher, fewer channels.
        teacher: the original model, or None where ``kd_weight`` and ``ikd_weight`` are 0.
        config: weights and places of the terms.
        kept: for ``ikd_init="selection"``: module name → the teacher's output channels that the student kept. For a
            block, the entry of the block itself or of its last conv or linear of that width is taken. By default what
            the student's channel config says.
        example: images to run both networks on once, to find the maps; by default zeros of the teacher's input size.

    Example:
        >>> def network(width):
        ...     head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4)
        ...     return nn.Sequential(nn.Conv2d(3, width, 1), nn.ReLU(), *head)
        >>> config = DistillationConfig(ikd_at=["0"], ikd_init="selection")
        >>> module = DistillationModule(network(2), network(8), config, {"0": [1, 5]}, torch.zeros(1, 3, 8, 8))
        >>> module(torch.zeros(2, 3, 8, 8), torch.tensor([0, 3])).total.shape, module.projections["0"].shape
        (torch.Size([]), torch.Size([8, 2]))
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module | None,
        config: DistillationConfig | None = None,
        kept: Mapping[str, Any] | None = None,
        example: torch.Tensor | None = None,
    ):
        super().__init__()
        self.config = config = config or DistillationConfig()
        if teacher is None and (config.kd_weight or config.ikd_weight):
            raise TrainingError("kd_weight and ikd_weight need a teacher: pass one, or set both to 0")
        if teacher is student:
            raise TrainingError("teacher and student are the same object; prune returns a new model: train that one")
        self.student = student
        self.projections = nn.ParameterDict()  # "/" for "." in the names: a parameter's name has no dot
        self._outside = (teacher,)  # in a tuple, which nn.Module does not register
        self._folded: dict[nn.Module, Callable] = {}  # stand-ins for the teacher's convs and norms
        self._folded_of: list = []  # the state of the teacher that they were made of
        self.taps: list[Tap] = []
        self._channel_dim: dict[str, int] = {}
        self.awaits_data = False
        if teacher is not None and (config.kd_weight or config.ikd_weight):
            teacher.eval()
            kept = kept_of(student, teacher) if kept is None else kept
            self._find_maps(kept, _example(teacher, student) if example is None else example)

    @property
    def teacher(self) -> nn.Module | None:
        return self._outside[0]

    @property
    def distils(self) -> bool:
        return bool(self.config.kd_weight or self.config.ikd_weight)

    def to(self, *args, **kwargs):
        if self.teacher is not None:
            self.teacher.to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        result = super().load_state_dict(*args, **kwargs)
        self.mark_initialised()
        return result

    def mark_initialised(self) -> None:
        """Say that every ``M_l`` has its values, from wherever: ``forward`` refuses to run before."""
        self.awaits_data = False

    def _find_maps(self, kept: Mapping[str, Any], example: torch.Tensor) -> None:
        config, student, teacher = self.config, self.student, self.teacher
        if config.ikd_weight:
            self.taps = find_taps(teacher, config.ikd_at, example)
            own = getattr(student, "channel_config", None)
            if isinstance(config.ikd_at, str) and isinstance(own, ChannelConfig):  # blocks that are gone have no maps
                self.taps = [tap for tap in self.taps if not own.lacks(tap.module)]
            for tap in self.taps:
                _check_in_student(student, tap)
        with eval_mode(student), torch.no_grad():
            teacher_logits, teacher_maps = self._run(teacher, example)
            logits, maps = self._run(student, example)
        if logits.shape != teacher_logits.shape:
            raise TrainingError(
                f"student and teacher give different outputs: {tuple(logits.shape)} and {tuple(teacher_logits.shape)}"
            )
        dims = self._channel_dims(maps, teacher_maps)
        self.taps = [tap for tap in self.taps if tap.name in dims]
        for tap in self.taps:
            dim = dims[tap.name]
            if dim is not None:  # equal widths need no M_l
                self._channel_dim[tap.name] = dim
                shape = teacher_maps[tap.name].shape[dim], maps[tap.name].shape[dim]
                if config.ikd_init == "selection":
                    weight = _selection(teacher, tap.name, kept, *shape)
                else:
                    weight = torch.zeros(shape)
                    self.awaits_data = True
                device = next(student.parameters()).device
                self.projections[tap.name.replace(".", "/")] = nn.Parameter(weight.to(device))

    def _channel_dims(self, student: Mapping[str, Any], teacher: Mapping[str, Any]) -> dict[str, int | None]:
        """`_channel_dim` of each tap. Maps that can't be compared are an error only where a user named them."""
        dims, error = {}, None
        for tap in self.taps:
            try:
                dims[tap.name] = _channel_dim(tap, student.get(tap.name), teacher[tap.name])
            except TrainingError as found:
                error = error or found
                if not isinstance(self.config.ikd_at, str):
                    raise
                _logger.info("inner distillation leaves out %s", found)
        if error is not None and not dims:
            raise error
        return dims

    def _run(self, model: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with listen(model, self.taps) as maps:
            logits = class_scores(model(images))
        if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
            raise TrainingError(f"{type(model).__name__} must return logits [batch, classes] to be distilled")
        return logits, maps

    @torch.no_grad()
    def _fold(self, images: torch.Tensor) -> dict[nn.Module, Callable]:
        """Stand-ins with which the teacher's convs do their norms' work; none where that changes what it returns."""
        with torch.autocast(images.device.type, enabled=False):
            images = images.to(next(self.teacher.parameters()).dtype)
            norm_after = watch_execution(self.teacher, images).norm_after
            folded = folded_norms(self.teacher, norm_after, leave={tap.module for tap in self.taps})
            logits, maps = self._run(self.teacher, images)
            with standing_in(folded):
                again, folded_maps = self._run(self.teacher, images)
        pairs = [(logits, again), *((maps[name], folded_maps[name]) for name in maps)]
        same = all((a - b).abs().max() <= 1e-3 * a.abs().max() for a, b in pairs)
        return folded if same else {}

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> Losses:
        config = self.config
        logits, kd, ikd = self.compare(images)
        ce = ce_loss(logits, targets, config.label_smoothing or 0.0)
        total = config.label_weight * ce + config.kd_weight * kd + config.ikd_weight * ikd
        return Losses(total, ce.detach(), kd.detach(), ikd.detach(), logits.detach())

    def compare(
        self, images: torch.Tensor, teacher_images: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The student's logits, KD and IKD, with gradients; a term that is off is 0.

        Args:
            images: for the student.
            teacher_images: the same for a teacher that wants another normalisation.
        """
        config = self.config
        if self.awaits_data:
            raise TrainingError("M_l is not initialised: call init_from_data(batches), or use ikd_init='selection'")
        teacher_maps, kd, ikd = {}, images.new_zeros(()), images.new_zeros(())
        if self.distils:
            self.teacher.eval()  # whatever the caller did to it in between
            teacher_images = images if teacher_images is None else teacher_images
            if self._folded_of != (now := _state_of(self.teacher)):
                self._folded, self._folded_of = self._fold(teacher_images[:2]), now
            with torch.no_grad(), standing_in(self._folded):
                teacher_logits, teacher_maps = self._run(self.teacher, teacher_images)
        logits, maps = self._run(self.student, images)
        if config.kd_weight:
            kd = kd_loss(logits, teacher_logits, config.temperature)
        if config.ikd_weight:
            ikd = sum(self._distance(tap, maps.pop(tap.name), teacher_maps.pop(tap.name)) for tap in self.taps)
            if config.ikd_reduction == "mean":
                ikd = ikd / len(self.taps)
        return logits, kd, ikd

    def _distance(self, tap: Tap, student_map: torch.Tensor, teacher_map: torch.Tensor) -> torch.Tensor:
        if tap.name in self._channel_dim:
            weight = self.projections[tap.name.replace(".", "/")]
            student_map = project(weight, student_map, self._channel_dim[tap.name])
        mean = self.config.ikd_reduction == "mean"
        return SquaredDistance.apply(student_map, teacher_map, student_map.numel() if mean else len(student_map))

    @torch.no_grad()
    def init_from_data(
        self, batches: Iterable[Any], reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> float:
        """Set every ``M_l`` to the ridge solution ``T Sᵀ (S Sᵀ + λ I)⁻¹`` on some batches, in float64.

        Both networks run in ``eval`` mode: bring the student's BatchNorm statistics up to date first (``recover``).
        With ``ikd_init="selection"`` every ``M_l`` has its values already, and keeps them.

        Args:
            batches: images, ``(images, labels)`` or dicts with pixel_values.
            reduce: sums a tensor over all processes, so that each gets the same solution.

        Returns:
            How far the student is from its teacher on these batches: the mean KL divergence of their outputs, in nats.
        """
        grams: dict[str, list[torch.Tensor]] = {}
        to_fit = self._channel_dim if self.config.ikd_init == "ridge" else {}
        distance = torch.zeros(2, dtype=torch.float64, device=_exact_device(next(self.student.parameters())))
        for batch in batches:
            images = images_of(batch).to(next(self.student.parameters()).device)
            with eval_mode(self.student, self.teacher):
                teacher_logits, teacher_maps = self._run(self.teacher, images)
                logits, maps = self._run(self.student, images)
            distance[0] += output_distance(teacher_logits, logits, logits=True).sum().to(distance.device)
            distance[1] += len(images)
            for name, dim in to_fit.items():
                _accumulate(grams, name, _rows(maps[name], dim), _rows(teacher_maps[name], dim))
        if not distance[1]:
            raise TrainingError("the start of M_l got no batch; give data")
        for name, pair in grams.items():
            gram, cross = (reduce(part) for part in pair) if reduce else pair
            gram, cross = gram.cpu(), cross.cpu()
            damping = self.config.ikd_ridge * gram.diagonal().mean() + torch.finfo(torch.float64).tiny ** 0.5
            solution = torch.linalg.solve(gram + damping * torch.eye(len(gram), dtype=gram.dtype), cross.T).T
            self.projections[name.replace(".", "/")].copy_(solution)
        self.mark_initialised()
        nats, count = (reduce(distance) if reduce else distance).tolist()
        return nats / count


def _state_of(model: nn.Module) -> list:
    """What changes with any of a model's tensors: where it is, and how often it was written."""
    tensors = [*model.parameters(), *model.buffers()]
    return [(t.data_ptr(), t.device, t.dtype, 0 if t.is_inference() else t._version) for t in tensors]


def _rows(features: torch.Tensor, dim: int) -> torch.Tensor:
    return features.movedim(dim, -1).reshape(-1, features.shape[dim])


def _accumulate(grams: dict, name: str, student: torch.Tensor, teacher: torch.Tensor, chunk: int = 2**16) -> None:
    """Add ``Σ s sᵀ`` and ``Σ t sᵀ`` in float64, by chunks: a float64 copy of a whole map may not fit."""
    if name not in grams:
        device = _exact_device(student)
        grams[name] = [
            torch.zeros(width, student.shape[1], dtype=torch.float64, device=device)
            for width in (student.shape[1], teacher.shape[1])
        ]
    for s, t in zip(student.split(chunk), teacher.split(chunk), strict=True):
        s, t = (part.to(grams[name][0].device).double() for part in (s, t))
        grams[name][0] += s.T @ s
        grams[name][1] += t.T @ s


def _exact_device(tensor: torch.Tensor) -> torch.device:
    """Where sums in float64 can be kept: MPS has none."""
    return torch.device("cpu") if tensor.device.type == "mps" else tensor.device


def _example(teacher: nn.Module, student: nn.Module) -> torch.Tensor:
    cfg = getattr(teacher, "pretrained_cfg", None) or getattr(student, "pretrained_cfg", None) or {}
    if not cfg.get("input_size"):
        raise TrainingError(f"{type(teacher).__name__} does not say its input size: pass example=images [N, C, H, W]")
    return torch.zeros(1, *cfg["input_size"], device=next(student.parameters()).device)


def _check_in_student(student: nn.Module, tap: Tap) -> None:
    try:
        student.get_submodule(tap.module)
    except AttributeError:
        raise TrainingError(
            f"inner distillation listens to {tap.module}, which the student does not have; student and teacher must "
            "have the same modules, or ikd_at must name those that both have"
        ) from None


def _channel_dim(tap: Tap, student: torch.Tensor | None, teacher: torch.Tensor) -> int | None:
    """The dim in which the maps differ: the channels. None where they agree; an error if it can't be the channels."""
    shapes = f"student {tuple(student.shape) if student is not None else None}, teacher {tuple(teacher.shape)}"
    if student is None or student.ndim != teacher.ndim:
        raise TrainingError(f"{tap.name}: the maps of student and teacher do not correspond: {shapes}")
    differing = [dim for dim in range(student.ndim) if student.shape[dim] != teacher.shape[dim]]
    if not differing:
        return None
    allowed = (1, 3) if student.ndim == 4 else (student.ndim - 1,)  # NCHW or NHWC; [B, C]; [B, N, C]
    if len(differing) > 1 or differing[0] not in allowed or student.ndim < 2:
        raise TrainingError(
            f"{tap.name}: the maps must differ in their channels only, but dims {differing} differ: {shapes}; "
            "leave this module out of ikd_at"
        )
    return differing[0]


def _selection(teacher: nn.Module, name: str, kept: Mapping[str, Any], wide: int, slim: int) -> torch.Tensor:
    """The matrix that puts each of the student's channels back where the teacher has it; zeros elsewhere."""
    makers = makers_at(teacher, name, wide)
    for key in makers:
        if key in kept and len(kept[key]) == slim:
            index = torch.as_tensor(kept[key], dtype=torch.long).cpu()
            if index.ndim != 1 or len(index.unique()) != slim or index.min() < 0 or index.max() >= wide:
                raise TrainingError(f"kept[{key!r}] must hold {slim} different channels from 0 to {wide - 1}")
            weight = torch.zeros(wide, slim)
            weight[index, torch.arange(slim)] = 1.0
            return weight
    raise TrainingError(
        f"ikd_init='selection' needs kept[{name!r}]: which {slim} of the teacher's {wide} channels the student kept "
        f"(or the entry of a layer inside: {', '.join(reversed(makers[1:4])) or 'none'}); or use ikd_init='ridge'"
    )
