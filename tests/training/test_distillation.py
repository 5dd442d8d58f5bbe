"""Every loss term is recomputed here from its formula with plain torch, without the code under test."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import timm_knapsack  # noqa: F401  (before timm)

import timm  # isort: skip
from timm_knapsack.errors import TrainingError
from timm_knapsack.maps.taps import Tap, find_blocks, find_convs, find_stages, find_taps, listen
from timm_knapsack.training import distillation
from timm_knapsack.training.distillation import DistillationConfig, DistillationModule
from timm_knapsack.training.losses import SquaredDistance, kd_loss


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.conv1 = nn.Conv2d(width, inner, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(inner, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.act2 = nn.ReLU(inplace=True)

    def forward(self, x):
        shortcut = x
        x = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        x += shortcut
        return self.act2(x)


class Net(nn.Module):
    """A residual net whose every activation and addition is in place, the worst case for hooks."""

    def __init__(self, width, inner, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.blocks = nn.Sequential(Block(width, inner), Block(width, inner))
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        return self.fc(self.blocks(self.act(self.stem(x))).mean((2, 3)))


def plain_forward(net, x):
    """Logits, block pre-activations and conv outputs of ``Net``, written out without any in-place operation."""
    blocks, convs = {}, {"stem": net.stem(x)}
    x = F.relu(convs["stem"])
    for i, block in enumerate(net.blocks):
        convs[f"blocks.{i}.conv1"] = block.conv1(x)
        inner = F.relu(block.bn1(convs[f"blocks.{i}.conv1"]))
        convs[f"blocks.{i}.conv2"] = block.conv2(inner)
        blocks[f"blocks.{i}"] = block.bn2(convs[f"blocks.{i}.conv2"]) + x
        x = F.relu(blocks[f"blocks.{i}"])
    return net.fc(x.mean((2, 3))), {"blocks": blocks, "convs": convs}


@pytest.fixture
def pair():
    torch.manual_seed(0)
    teacher, student = Net(8, 6), Net(5, 3)
    images, targets = torch.randn(4, 3, 6, 6), torch.tensor([0, 4, 2, 1])
    return student, teacher.eval(), images, targets


def make(pair, **options):
    student, teacher, images, _ = pair
    config = DistillationConfig(**{"label_smoothing": 0.1, **options})
    module = DistillationModule(student, teacher, config, example=images)
    if module.projections and module.config.ikd_init == "ridge":
        generator = torch.Generator().manual_seed(1)
        for weight in module.projections.values():  # any values: the formula must hold for all
            weight.data = torch.randn(weight.shape, generator=generator)
        module.mark_initialised()
    return module


def project(matrix, features):
    return torch.einsum("ts,bshw->bthw", matrix, features)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("at", ["blocks", "convs"])
def test_every_term_and_gradient_equals_its_formula(pair, at, reduction):
    student, teacher, images, targets = pair
    weights = {"ce_weight": 1.0, "kd_weight": 0.7, "ikd_weight": 3.0}
    module = make(pair, ikd_at=at, ikd_reduction=reduction, temperature=2.0, **weights)
    reference = copy.deepcopy(student)
    matrices = {n.replace("/", "."): p.detach().clone().requires_grad_() for n, p in module.projections.items()}
    module.train()
    losses = module(images, targets)
    losses.total.backward()

    reference.train()
    logits, maps = plain_forward(reference, images)
    with torch.no_grad():
        teacher_logits, teacher_maps = plain_forward(teacher, images)
    log_p = logits - logits.exp().sum(1, keepdim=True).log()
    ce = -(0.9 * log_p[range(4), targets] + 0.1 * log_p.mean(1)).mean()
    kd = -(F.softmax(teacher_logits / 2, 1) * F.log_softmax(logits / 2, 1)).sum(1).mean() * 4
    distances = []
    for name, student_map in maps[at].items():
        squared = (teacher_maps[at][name] - project(matrices[name], student_map)) ** 2
        distances.append(squared.mean() if reduction == "mean" else squared.sum() / len(images))
    ikd = sum(distances) / (len(distances) if reduction == "mean" else 1)
    total = ce + 0.7 * kd + 3.0 * ikd
    total.backward()

    torch.testing.assert_close(losses.ce, ce.detach())
    torch.testing.assert_close(losses.kd, kd.detach())
    torch.testing.assert_close(losses.ikd, ikd.detach())
    torch.testing.assert_close(losses.total, total)
    torch.testing.assert_close(losses.logits, logits.detach())
    assert set(matrices) == set(maps[at])
    for name, matrix in matrices.items():
        torch.testing.assert_close(module.projections[name.replace(".", "/")].grad, matrix.grad)
    for (name, ours), theirs in zip(student.named_parameters(), reference.parameters(), strict=True):
        close = {"rtol": 1e-4, "atol": 1e-4 * theirs.grad.abs().max().item()}
        torch.testing.assert_close(ours.grad, theirs.grad, **close, msg=lambda m, name=name: f"{name}: {m}")


def test_soft_targets_with_smoothing(pair):
    student, _, images, _ = pair
    soft = torch.softmax(torch.randn(4, 5), 1)
    module = make(pair, kd_weight=0, ikd_weight=0, label_smoothing=0.2).eval()
    losses = module(images, soft)
    log_p = F.log_softmax(student(images), 1)
    expected = -((0.8 * soft + 0.2 / 5) * log_p).sum(1).mean()
    torch.testing.assert_close(losses.ce, expected)
    torch.testing.assert_close(losses.total, expected)
    assert losses.kd == 0 and losses.ikd == 0


def test_kd_is_the_papers_equation_at_temperature_1():
    s, t = torch.randn(3, 7), torch.randn(3, 7)
    expected = sum(-torch.log(F.softmax(s[x], 0)[i]) * F.softmax(t[x], 0)[i] for x in range(3) for i in range(7)) / 3
    torch.testing.assert_close(kd_loss(s, t), expected)
    # its gradient vanishes where the student is the teacher
    s = t.clone().requires_grad_()
    kd_loss(s, t, temperature=4.0).backward()
    assert s.grad.abs().max() < 1e-6


def test_maps_are_read_before_in_place_operations(pair):
    _, teacher, images, _ = pair
    taps = find_taps(teacher, "blocks", images)
    assert taps[0] == Tap("blocks.0", "blocks.0.act2", "input")
    with torch.no_grad(), listen(teacher, taps) as maps:
        teacher(images)
    expected = plain_forward(teacher, images)[1]["blocks"]
    for name in expected:
        torch.testing.assert_close(maps[name], expected[name])
    # the check can fail: a hook that only keeps the reference sees what ReLU(inplace=True) left of it
    naive = {}
    handle = teacher.blocks[0].act2.register_forward_pre_hook(lambda m, args: naive.update(x=args[0]))
    with torch.no_grad():
        teacher(images)
    handle.remove()
    assert naive["x"].min() == 0 and expected["blocks.0"].min() < 0


def test_teacher_stays_outside(pair):
    student, teacher, images, targets = pair
    before = copy.deepcopy(teacher.state_dict())
    module = make(pair)
    own = {id(p) for p in student.parameters()} | {id(p) for p in module.projections.values()}
    assert {id(p) for p in module.parameters()} == own
    assert all(name.startswith(("student.", "projections.")) for name in module.state_dict())
    teacher.train()
    module.train()
    module(images, targets).total.backward()
    assert not teacher.training and all(p.grad is None for p in teacher.parameters())
    for name, value in teacher.state_dict().items():
        assert torch.equal(value, before[name]), name


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_student_carries_no_trace(pair):
    student, teacher, images, targets = pair
    keys = list(student.state_dict())
    module = make(pair)
    module(images, targets)
    with pytest.raises(RuntimeError):
        module(torch.zeros(2, 7, 6, 6), targets)  # a forward that fails half-way
    for network in (module.student, teacher):
        assert hooks(network) == 0
    assert module.student is student and list(student.state_dict()) == keys
    for clone in (copy.deepcopy(student), pickle.loads(pickle.dumps(student))):
        assert torch.equal(clone.eval()(images), student.eval()(images))


def test_equal_widths_have_no_matrix():
    torch.manual_seed(0)
    teacher, student = Net(8, 6), Net(8, 3)
    images = torch.randn(2, 3, 6, 6)
    blocks = DistillationModule(student, teacher, DistillationConfig(ikd_at="blocks"), example=images)
    assert not blocks.projections  # and so nothing to initialise
    expected = [plain_forward(net.eval(), images)[1]["blocks"] for net in (teacher, student)]
    distance = sum(((expected[0][n] - expected[1][n]) ** 2).mean() for n in expected[0]) / 2
    torch.testing.assert_close(blocks.eval()(images, torch.tensor([0, 1])).ikd, distance.detach())
    convs = DistillationModule(student, teacher, DistillationConfig(ikd_at="convs"), example=images)
    assert sorted(convs.projections) == ["blocks/0/conv1", "blocks/1/conv1"]


def test_selection_puts_kept_channels_back(pair):
    student, teacher, images, _ = pair
    kept = {"stem": [0, 2, 3, 6, 7], "blocks.0.conv1": torch.tensor([1, 4, 5]), "blocks.0.conv2": [0, 2, 3, 6, 7]}
    kept |= {"blocks.1.conv1": [0, 1, 2], "blocks.1.conv2": [0, 2, 3, 6, 7]}
    convs = DistillationModule(student, teacher, DistillationConfig(ikd_at="convs", ikd_init="selection"), kept, images)
    matrix = convs.projections["blocks/0/conv1"].detach()
    features = torch.randn(1, 3, 2, 2)
    back = project(matrix, features)
    assert torch.equal(back[:, [1, 4, 5]], features) and back[:, [0, 2, 3]].abs().sum() == 0
    # a block takes the entry of its last conv of that width
    blocks = DistillationModule(student, teacher, DistillationConfig(ikd_init="selection"), kept, images)
    assert blocks.projections["blocks/0"].nonzero()[:, 0].tolist() == kept["stem"]


def test_ridge_start_is_the_least_squares_solution(pair):
    student, teacher, *_ = pair
    batches = [(torch.randn(4, 3, 6, 6), None) for _ in range(3)]
    config = DistillationConfig(ikd_at="blocks", ikd_ridge=1e-3)
    module = DistillationModule(student, teacher, config, example=batches[0][0])
    module.train()
    module.init_from_data(batches)
    assert student.training and student.blocks[0].bn1.num_batches_tracked == 0
    rows = {}
    for net in (student, teacher):
        maps = [plain_forward(net.eval(), images)[1]["blocks"] for images, _ in batches]
        for name in maps[0]:
            flat = torch.cat([m[name].movedim(1, -1).flatten(0, -2) for m in maps]).double().detach()
            rows.setdefault(name, []).append(flat)
    for name, (s, t) in rows.items():
        damping = 1e-3 * (s**2).sum(0).mean()
        stacked = torch.cat([s, damping.sqrt() * torch.eye(s.shape[1], dtype=s.dtype)])
        padded = torch.cat([t, torch.zeros(s.shape[1], t.shape[1], dtype=t.dtype)])
        expected = torch.linalg.lstsq(stacked, padded).solution.T.float()
        torch.testing.assert_close(module.projections[name.replace(".", "/")].detach(), expected, atol=1e-4, rtol=1e-4)


def test_sharded_ridge_equals_whole(pair):
    """Two processes that each see half of the batches, with a reduce that adds the other's part."""
    student, teacher, images, _ = pair
    batches = [torch.randn(4, 3, 6, 6) for _ in range(4)]
    whole, half = (DistillationModule(student, teacher, example=images) for _ in range(2))
    whole.init_from_data(batches)
    parts = []
    half.init_from_data(batches[2:], reduce=lambda part: (parts.append(part), part)[1])
    waiting = iter(parts)
    half.init_from_data(batches[:2], reduce=lambda part: part + next(waiting))
    for name, matrix in whole.projections.items():
        torch.testing.assert_close(half.projections[name], matrix)


def test_differences_of_bf16_maps_are_squared_in_float32(pair):
    student, teacher, images, targets = pair
    module = make(pair, ikd_at="blocks").eval()
    with torch.autocast("cpu", torch.bfloat16):
        module._fold = lambda images: {}  # folded weights round otherwise
        losses = module(images, targets)
        with torch.no_grad():
            maps = [plain_forward(net, images)[1]["blocks"] for net in (student.eval(), teacher)]
            terms = []
            for name in maps[0]:
                predicted = F.conv2d(maps[0][name], module.projections[name.replace(".", "/")][:, :, None, None])
                assert predicted.dtype == torch.bfloat16
                terms.append(((predicted - maps[1][name]).float() ** 2).mean())  # a difference of bf16 is exact enough
    assert losses.ikd.dtype == losses.total.dtype == torch.float32
    torch.testing.assert_close(losses.ikd, sum(terms) / len(terms))


def test_tokens_and_channels_last_maps():
    torch.manual_seed(0)
    sizes = {"img_size": 32, "depth": 2, "num_classes": 5}
    teacher = timm.create_model("vit_tiny_patch16_224", embed_dim=24, num_heads=2, **sizes)
    student = timm.create_model("vit_tiny_patch16_224", embed_dim=16, num_heads=2, **sizes)
    images, targets = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    module = DistillationModule(student, teacher, DistillationConfig(ikd_at="blocks"), example=images)
    module.init_from_data([images])
    losses = module.eval()(images, targets)
    with torch.no_grad():
        first = [
            net.blocks[0](net.norm_pre(net.patch_drop(net._pos_embed(net.patch_embed(images)))))
            for net in (student, teacher)
        ]
        second = [net.blocks[1](x) for net, x in zip((student, teacher), first, strict=True)]
        expected = (
            sum(((t - s @ module.projections[f"blocks/{i}"].T) ** 2).mean() for i, (s, t) in enumerate((first, second)))
            / 2
        )
    torch.testing.assert_close(losses.ikd, expected)
    assert "blocks.0.attn.qkv" in find_convs(teacher) and "head" not in find_convs(teacher)

    swin = {"img_size": 32, "window_size": 4, "depths": (1, 1), "num_classes": 5, "patch_size": 2}
    name = "swin_tiny_patch4_window7_224"
    wide, slim = (timm.create_model(name, embed_dim=width, num_heads=(2, 2), **swin) for width in (16, 8))
    module = DistillationModule(slim, wide, DistillationConfig(ikd_at="blocks"), example=images)
    module.init_from_data([images])
    assert module._channel_dim == {"layers.0.blocks.0": 3, "layers.1.blocks.0": 3}
    assert module.eval()(images, targets).ikd > 0


@pytest.mark.parametrize(
    ("name", "blocks", "stages", "tap"),
    [
        ("resnet18", 8, 4, Tap("layer1.0", "layer1.0.act2", "input")),
        ("resnet50", 16, 4, Tap("layer1.0", "layer1.0.act3", "input")),
        ("efficientnet_b0", 16, 5, Tap("blocks.0.0", "blocks.0.0", "output")),  # a linear bottleneck
        ("regnetx_002", 13, 4, Tap("s1.b1", "s1.b1.act3", "input")),
        ("convnext_atto", 12, 4, Tap("stages.0.blocks.0", "stages.0.blocks.0", "output")),
        ("cifar_resnet20", 9, 3, None),
    ],
)
def test_blocks_and_stages_of_timm_models(name, blocks, stages, tap):
    if name == "cifar_resnet20":
        model = timm.create_model(name)
        assert find_taps(model, "blocks", torch.zeros(1, 3, 32, 32))[0].side == "input"
    else:
        with torch.device("meta"):
            model = timm.create_model(name)
            assert find_taps(model, "blocks", torch.zeros(1, 3, 224, 224))[0] == tap
    assert len(find_blocks(model)) == blocks
    assert len(find_stages(model)) == stages and find_stages(model)[-1] == find_blocks(model)[-1]


def test_shared_activation_is_read_at_its_last_call():
    """torchvision's way: one ReLU object for the whole block."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2, self.relu = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True)

        def forward(self, x):
            return self.relu(self.conv2(self.relu(self.conv1(x))) + x)

    net, x = nn.Sequential(Shared(), Shared()), torch.randn(2, 3, 4, 4)
    with listen(net, find_taps(net, "blocks", x)) as maps:
        net(x)
    block = net[0]
    torch.testing.assert_close(maps["0"], block.conv2(F.relu(block.conv1(x))) + x)


def test_user_named_modules(pair):
    module = make(pair, ikd_at=["blocks.1", "stem"])
    assert [tap.name for tap in module.taps] == ["blocks.1", "stem"]
    assert module.config.ikd_at == ("blocks.1", "stem")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kd_weight": -1}, "kd_weight must be a number at least 0"),
        ({"ikd_weight": float("nan")}, "ikd_weight must be a number"),
        ({"temperature": 0}, "temperature"),
        ({"label_smoothing": 1.5}, "label_smoothing must be a number from 0 to 1"),
        ({"ikd_at": "layers"}, "'convs', 'blocks', 'stages'"),
        ({"ikd_at": []}, "at least one module"),
        ({"ikd_init": "random"}, "'ridge', 'selection'"),
        ({"ikd_reduction": "max"}, "'mean', 'sum'"),
        ({"ikd_init_batches": 1.5}, "whole number"),
    ],
)
def test_config_errors(options, words):
    with pytest.raises(TrainingError, match=words):
        DistillationConfig(**options)


def test_module_errors(pair):
    student, teacher, images, targets = pair
    with pytest.raises(TrainingError, match="need a teacher"):
        DistillationModule(student, None, example=images)
    with pytest.raises(TrainingError, match="same object"):
        DistillationModule(teacher, teacher, example=images)
    with pytest.raises(TrainingError, match=r"needs kept\['blocks.0'\].*ridge"):
        DistillationModule(student, teacher, DistillationConfig(ikd_init="selection"), example=images)
    with pytest.raises(TrainingError, match="5 different channels from 0 to 7"):
        bad = {"stem": [0, 1, 2, 3, 8]}
        DistillationModule(student, teacher, DistillationConfig(ikd_init="selection", ikd_at=["stem"]), bad, images)
    with pytest.raises(TrainingError, match="'nowhere', which is no module of Net"):
        make(pair, ikd_at=["nowhere"])
    with pytest.raises(TrainingError, match="input size"):
        DistillationModule(student, teacher)
    with pytest.raises(TrainingError, match="different outputs"):
        DistillationModule(Net(5, 3, classes=7), teacher, example=images)
    with pytest.raises(TrainingError, match="init_from_data"):
        DistillationModule(student, teacher, example=images)(images, targets)
    with pytest.raises(TrainingError, match="no batch"):
        DistillationModule(student, teacher, example=images).init_from_data([])
    flat = nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 5))
    single = nn.Sequential(nn.Conv2d(3, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(TrainingError, match="looked for a member of an nn"):
        DistillationModule(copy.deepcopy(single), single, example=images)
    with pytest.raises(TrainingError, match="which the student does not have"):
        DistillationModule(flat, teacher, DistillationConfig(ikd_at="blocks"), example=images)


def test_a_network_without_blocks_is_read_at_its_layers_before_the_last(pair):
    def network(width):
        convs = nn.Conv2d(3, width, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 1), nn.ReLU()
        return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 4), nn.Linear(4, 2))

    *_, images, targets = pair
    kept = {"0": [0, 2], "2": [1, 3, 4, 7]}
    module = DistillationModule(network(2), network(4), DistillationConfig(ikd_init="selection"), kept, images)
    assert [tap.name for tap in module.taps] == ["0", "2", "6"]
    assert {name: tuple(weight.shape) for name, weight in module.projections.items()} == {"0": (4, 2), "2": (8, 4)}
    assert module(images, targets % 2).ikd > 0


def test_maps_that_differ_in_more_than_channels_are_refused(pair):
    _, teacher, images, _ = pair
    strided = Net(5, 3)
    strided.stem.stride = (2, 2)
    with pytest.raises(TrainingError, match=r"blocks.0: .*channels only, but dims \[1, 2, 3\] differ"):
        DistillationModule(strided, teacher, example=images)


def test_maps_that_do_not_correspond_are_refused():
    tap = SimpleNamespace(name="blocks.0", module="blocks.0")
    teacher = torch.zeros(2, 8, 4, 4)
    assert distillation._channel_dim(tap, torch.zeros(2, 5, 4, 4), teacher) == 1
    for student, shown in ((None, "None"), (torch.zeros(2, 5, 16), r"\(2, 5, 16\)")):
        with pytest.raises(TrainingError, match=rf"do not correspond: student {shown}, teacher \(2, 8, 4, 4\)"):
            distillation._channel_dim(tap, student, teacher)


def test_the_error_names_the_layers_whose_entry_would_do(pair):
    student, teacher, images, _ = pair
    with pytest.raises(TrainingError, match=r"kept\['blocks.0'\].* a layer inside: blocks.0.conv2\)"):
        DistillationModule(student, teacher, DistillationConfig(ikd_init="selection"), example=images)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squared_distance_is_mse_with_its_gradient(dtype):
    torch.manual_seed(0)
    made, wanted = (torch.randn(3, 4, 5, 5).to(dtype) for _ in range(2))
    made.requires_grad_(True)
    distance = SquaredDistance.apply(made, wanted, made.numel())
    distance.mul(3).backward()
    again = made.detach().double().requires_grad_(True)
    expected = F.mse_loss(again, wanted.double())
    expected.mul(3).backward()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
    torch.testing.assert_close(distance.double(), expected, **tolerance)
    torch.testing.assert_close(made.grad.double(), again.grad, **tolerance)
    assert made.grad.dtype == dtype


def test_an_activation_that_overwrites_its_input_does_so_again_afterwards():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True))
    images = torch.randn(2, 3, 4, 4)
    with listen(net, [Tap("block", "1", "input")]) as maps:
        out = net(images)
    assert net[1].inplace
    torch.testing.assert_close(maps["block"], net[0](images))
    assert (maps["block"] < 0).any() and (out >= 0).all()


def trained(net):
    """Norms that do something, so that a fold which forgets one of their numbers shows."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight.data, module.running_var):
                tensor.uniform_(0.5, 2.0)
            for tensor in (module.bias.data, module.running_mean):
                tensor.normal_()
    return net.eval()


def test_the_teachers_norms_are_folded_and_nobody_sees_it():
    torch.manual_seed(0)
    student, teacher, x = Net(4, 3), trained(Net(4, 8)), torch.randn(4, 3, 8, 8)
    before = copy.deepcopy(teacher.state_dict())
    module = DistillationModule(student.eval(), teacher, DistillationConfig(), example=x)
    losses = module(x, torch.zeros(4, dtype=torch.long))
    assert len(module._folded) == 8  # 4 convs and the norms behind them
    (logits, maps), (ours, our_maps) = plain_forward(teacher, x), plain_forward(student, x)
    ikd = sum((our_maps["blocks"][name] - wanted).square().mean() for name, wanted in maps["blocks"].items()) / 2
    torch.testing.assert_close(losses.ikd, ikd.detach())
    torch.testing.assert_close(losses.kd, kd_loss(ours, logits).detach())
    assert not any("forward" in vars(part) for part in teacher.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    nn.init.constant_(teacher.blocks[0].bn1.weight, 3.0)  # other weights than those that were folded
    again = module(x, torch.zeros(4, dtype=torch.long)).kd
    torch.testing.assert_close(again, kd_loss(ours, plain_forward(teacher, x)[0]).detach())
    assert not torch.allclose(again, losses.kd)


def test_a_conv_that_others_read_keeps_its_norm():
    class Peeks(Net):
        def forward(self, x):
            x = self.act(self.stem(x))
            inner = self.blocks[0].conv1(x)
            y = self.blocks[0].conv2(self.blocks[0].act1(self.blocks[0].bn1(inner)))
            return self.fc(self.blocks[0].bn2(y).mean((2, 3))) + inner.mean((1, 2, 3)).unsqueeze(1)

    torch.manual_seed(0)
    teacher, x = trained(Peeks(4, 8)), torch.randn(4, 3, 8, 8)
    config = DistillationConfig(ikd_weight=0.0)
    module = DistillationModule(Peeks(4, 3).eval(), teacher, config, example=x)
    losses = module(x, torch.zeros(4, dtype=torch.long))
    assert module._folded == {}
    torch.testing.assert_close(losses.kd, kd_loss(module.student(x), teacher(x)).detach())


def test_labels_are_left_out_beside_kd_unless_they_are_asked_for(pair):
    *_, images, targets = pair
    for weights, used in (({}, False), ({"kd_weight": 0.0}, True), ({"ce_weight": 0.5}, True)):
        module = make(pair, **weights).eval()
        right, wrong = module(images, targets), module(images, (targets + 1) % 5)
        assert (right.total != wrong.total) == used and right.ce != wrong.ce
