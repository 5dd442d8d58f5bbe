"""Small networks, written by hand, whose code does something with channels that is easily got wrong.

Each is `Nasty(name)`: a conv of 16 channels and its norm, what the name says, a conv, a depthwise conv with a skip
connection around it, and a head. `NASTY` holds them all. Which can be pruned through and which must be frozen is not
said here: ``tests/channels/test_nasty_networks.py`` compares slim and masked networks.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IMAGE = (1, 3, 6, 6)
WIDTH = 16

# name → (what the network owns besides, what it does with the map [B, 16, 6, 6] of its stem)
NASTY: dict[str, tuple[Callable[[nn.Module], None], Callable[[nn.Module, Tensor], Tensor]]] = {}


def nasty(owns: Callable[[nn.Module], None] = lambda net: None):
    def register(does: Callable[[nn.Module, Tensor], Tensor]):
        NASTY[does.__name__] = owns, does
        return does

    return register


class Nasty(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        torch.manual_seed(0)
        owns, self._does = NASTY[name]
        self.stem, self.norm = nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH)
        owns(self)
        with torch.no_grad():
            width = self._does(self.eval(), torch.randn(2, WIDTH, 6, 6)).shape[1]
        self.after = nn.Conv2d(width, 12, 1)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.fc = nn.Linear(12, 4)

    def forward(self, x):
        y = self.after(self._does(self, self.norm(self.stem(x)).tanh())).relu()
        return self.fc((y + self.depthwise(y)).mean((2, 3)))


def owning(**made: Callable[[], object]) -> Callable[[nn.Module], None]:
    """Modules and parameters become members; plain tensors buffers; other values attributes."""

    def own(net: nn.Module) -> None:
        for name, make in made.items():
            value = make()
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                net.register_buffer(name, value)
            else:
                setattr(net, name, value)

    return own


def ramp(size: int = WIDTH) -> Tensor:
    return torch.linspace(0.5, 1.5, size).view(1, -1, 1, 1)


# ---- buffers, masks, embeddings -----------------------------------------------------------------------------------


@nasty(owning(scale=ramp))
def buffer_of_the_width(net, y):
    return y * net.scale


@nasty(owning(mask=lambda: (torch.arange(WIDTH) % 3 > 0).float().view(1, -1, 1, 1)))
def mask_as_a_buffer(net, y):
    return y * net.mask


@nasty(owning(mask=lambda: torch.arange(WIDTH).view(1, -1, 1, 1) < 5))
def bool_mask_as_a_buffer(net, y):
    return torch.where(net.mask, y, -y)


@nasty(owning(mask=lambda: torch.arange(WIDTH) < 5))
def picked_by_a_bool_mask(net, y):
    return torch.cat([y[:, net.mask], 2 * y[:, ~net.mask]], 1)


@nasty(owning(order=lambda: torch.randperm(WIDTH)))
def permuted_by_a_buffer(net, y):
    return y[:, net.order]


@nasty(owning(order=lambda: torch.randperm(WIDTH)))
def index_select_by_a_buffer(net, y):
    return y + y.index_select(1, net.order)


@nasty()
def index_select_by_literals(net, y):
    return torch.cat([y, y.index_select(1, torch.tensor([0, 3, 7], device=y.device))], 1)


@nasty()
def gathered_by_literals(net, y):
    index = torch.tensor([1, 0, 5], device=y.device).view(1, 3, 1, 1).expand(y.shape[0], 3, *y.shape[2:])
    return y + y.gather(1, index).sum(1, keepdim=True)


@nasty()
def scattered_by_literals(net, y):
    index = torch.tensor([2, 9], device=y.device).view(1, 2, 1, 1).expand(y.shape[0], 2, *y.shape[2:])
    return y.scatter(1, index, torch.ones_like(y[:, :2]))


@nasty()
def where_on_the_index(net, y):
    index = torch.arange(y.shape[1], device=y.device).view(1, -1, 1, 1)
    return torch.where(index < 8, y, y * 2)


@nasty()
def where_on_the_index_from_the_end(net, y):
    index = torch.arange(y.shape[1] - 1, -1, -1, device=y.device).view(1, -1, 1, 1)
    return torch.where(index < 4, y, y * 2)


@nasty(owning(table=lambda: nn.Embedding(5, WIDTH)))
def embedding_added(net, y):
    return y + net.table(torch.tensor([3], device=y.device)).view(1, -1, 1, 1)


@nasty(owning(table=lambda: nn.Embedding(WIDTH, 1)))
def embedding_of_each_channel(net, y):
    return y * net.table(torch.arange(y.shape[1], device=y.device)).view(1, -1, 1, 1)


@nasty(owning(gain=lambda: nn.Parameter(torch.ones(WIDTH, 1, 1))))
def layer_scale(net, y):
    return y * net.gain


@nasty(owning(gain=lambda: nn.Parameter(torch.ones(2 * WIDTH, 1, 1))))
def first_half_of_a_larger_scale(net, y):
    return y * net.gain[: y.shape[1]]


@nasty(owning(gain=lambda: nn.Parameter(torch.rand(2 * WIDTH))))
def last_half_of_a_larger_scale(net, y):
    return y * net.gain[-y.shape[1] :].view(1, -1, 1, 1)


@nasty(owning(count=lambda: torch.tensor(float(WIDTH))))
def width_as_a_buffer(net, y):
    return y / net.count


@nasty(owning(count=lambda: torch.tensor(WIDTH)))
def width_as_an_int_buffer(net, y):
    return y * (2.0 if y.shape[1] == int(net.count) else 1.0)


# ---- along the channels -------------------------------------------------------------------------------------------


@nasty()
def cumsum_over_channels(net, y):
    return y.cumsum(1)


@nasty()
def softmax_over_channels(net, y):
    return y * y.softmax(1)


@nasty()
def softmax_with_a_temperature_of_the_width(net, y):
    return y * (y / math.sqrt(y.shape[1])).softmax(1)


@nasty()
def argmax_over_channels(net, y):
    return y * y.argmax(1, keepdim=True)


@nasty()
def the_largest_alone(net, y):
    return torch.zeros_like(y).scatter(1, y.argmax(1, keepdim=True), 1.0)


@nasty()
def top_channels(net, y):
    return y.topk(4, 1).values


@nasty()
def top_half_of_the_channels(net, y):
    return y * (y >= y.topk(y.shape[1] // 2, 1).values[:, -1:])


@nasty()
def sorted_channels(net, y):
    return y.sort(1, descending=True).values


@nasty()
def kth_value_over_channels(net, y):
    return y - y.kthvalue(3, 1, keepdim=True).values


@nasty()
def median_over_channels(net, y):
    return y - y.median(1, keepdim=True).values


@nasty()
def unit_length_over_channels(net, y):
    return F.normalize(y, dim=1)


@nasty()
def unit_length_by_hand(net, y):
    return y / (1 + y.square().sum(1, keepdim=True).sqrt())


@nasty()
def mean_and_variance_by_hand(net, y):
    mean = y.sum(1, keepdim=True) / y.shape[1]
    return (y - mean) * torch.rsqrt((y - mean).square().mean(1, keepdim=True) + 1e-5)


@nasty()
def mean_by_a_literal_width(net, y):
    return y - y.sum(1, keepdim=True) / WIDTH


@nasty()
def local_response_norm(net, y):
    return F.local_response_norm(y, 3)


@nasty()
def global_response_norm(net, y):
    size = y.norm(p=2, dim=(2, 3), keepdim=True)
    return y + y * size / (size.mean(1, keepdim=True) + 1e-6)


@nasty()
def interpolated_over_channels(net, y):
    shape = y.shape
    y = F.interpolate(y.flatten(2).transpose(1, 2), scale_factor=2, mode="nearest")
    return y.transpose(1, 2).reshape(shape[0], -1, *shape[2:])


@nasty()
def pooled_over_channels(net, y):
    return F.avg_pool1d(y.flatten(2).transpose(1, 2), 2).transpose(1, 2).reshape(y.shape[0], -1, *y.shape[2:])


@nasty()
def pooled_to_literal_channels(net, y):
    return F.adaptive_avg_pool1d(y.flatten(2).transpose(1, 2), 8).transpose(1, 2).reshape(y.shape[0], -1, *y.shape[2:])


@nasty()
def flipped_over_channels(net, y):
    return y - y.flip(1)


@nasty()
def rolled_over_channels(net, y):
    return torch.cat([y, y.roll(2, 1)], 1)


@nasty()
def shifted_by_parts(net, y):
    """TSM, AS-MLP: parts of the channels move by a pixel; how many, follows the width."""
    part = y.shape[1] // 4
    moved = y.clone()
    moved[:, :part] = y[:, :part].roll(1, 2)
    moved[:, part : 2 * part] = y[:, part : 2 * part].roll(-1, 2)
    return moved


@nasty()
def difference_of_neighbours(net, y):
    return torch.diff(y, dim=1)


@nasty()
def spectrum_over_channels(net, y):
    return torch.fft.fft(y, dim=1).real


@nasty()
def spectrum_over_pixels(net, y):
    return torch.fft.irfft2(torch.fft.rfft2(y) * 0.5, s=y.shape[2:])


@nasty()
def low_channels_of_the_spectrum(net, y):
    return torch.fft.irfft(torch.fft.rfft(y, dim=1)[:, :5], n=y.shape[1], dim=1)


@nasty()
def windows_over_channels(net, y):
    return y.unfold(1, 4, 4).mean(-1)


@nasty(owning(lstm=lambda: nn.LSTM(WIDTH, 6, batch_first=True)))
def lstm_over_pixels(net, y):
    out = net.lstm(y.flatten(2).transpose(1, 2))[0]
    return out.transpose(1, 2).reshape(y.shape[0], -1, *y.shape[2:])


@nasty(owning(gru=lambda: nn.GRU(1, 3, batch_first=True, bidirectional=True)))
def gru_over_channels(net, y):
    state = net.gru(y.mean((2, 3)).unsqueeze(-1))[0]
    return y * state.mean(-1)[..., None, None].sigmoid()


# ---- products and weights -----------------------------------------------------------------------------------------


@nasty(owning(weight=lambda: nn.Parameter(torch.randn(WIDTH, 10))))
def einsum_of_a_weight(net, y):
    return torch.einsum("bchw,cd->bdhw", y, net.weight)


@nasty()
def gram_matrix(net, y):
    gram = torch.einsum("bchw,bdhw->bcd", y, y) / y.shape[1]
    return torch.einsum("bcd,bdhw->bchw", gram, y)


@nasty()
def attention_between_channels(net, y):
    q = y.flatten(2)
    return ((q @ q.transpose(1, 2)) / q.shape[-1]).softmax(-1).matmul(q).view_as(y)


@nasty()
def attention_between_pixels_scaled_by_the_width(net, y):
    q = y.flatten(2).transpose(1, 2)
    return ((q @ q.transpose(1, 2)) * q.shape[-1] ** -0.5).softmax(-1).matmul(q).transpose(1, 2).reshape(y.shape)


@nasty(owning(bilinear=lambda: nn.Bilinear(WIDTH, WIDTH, 5)))
def bilinear_layer(net, y):
    z = y.permute(0, 2, 3, 1).contiguous()
    return net.bilinear(z, z.tanh()).permute(0, 3, 1, 2)


@nasty(owning(weight=lambda: nn.Parameter(torch.randn(20, WIDTH, 1, 1))))
def functional_conv_with_a_slice_of_weights(net, y):
    return F.conv2d(y, net.weight[:10])


@nasty(owning(weight=lambda: nn.Parameter(torch.randn(10, 24, 1, 1))))
def functional_conv_with_as_many_inputs_as_there_are(net, y):
    return F.conv2d(y, net.weight[:, : y.shape[1]])


@nasty(owning(weight=lambda: nn.Parameter(torch.randn(24, WIDTH, 1, 1))))
def one_weight_for_two_convs(net, y):
    return torch.cat([F.conv2d(y, net.weight[:8]), F.conv2d(y.relu(), net.weight[8:]), F.conv2d(y, net.weight)], 1)


@nasty(owning(conv=lambda: nn.Conv2d(WIDTH, 10, 1), mask=lambda: torch.rand(10, WIDTH, 1, 1).round()))
def conv_with_masked_weights(net, y):
    return F.conv2d(y, net.conv.weight * net.mask, net.conv.bias)


@nasty(owning(conv=lambda: nn.Conv2d(WIDTH, WIDTH, 1), inputs=lambda: ramp().view(1, -1, 1, 1)))
def conv_with_weights_scaled_by_the_input_index(net, y):
    return F.conv2d(y, net.conv.weight * net.inputs, net.conv.bias)


@nasty(owning(conv=lambda: nn.Conv2d(WIDTH, WIDTH, 1)))
def weights_normalised_over_inputs(net, y):
    weight = net.conv.weight
    return F.conv2d(y, weight / (1e-3 + weight.square().mean((1, 2, 3), keepdim=True).sqrt()), net.conv.bias)


@nasty(owning(conv=lambda: nn.Conv2d(WIDTH, WIDTH, 1)))
def weights_scaled_by_their_fan_in(net, y):
    return F.conv2d(y, net.conv.weight * net.conv.weight[0].numel() ** -0.5, net.conv.bias)


@nasty(owning(conv=lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(WIDTH, WIDTH, 1))))
def weight_norm(net, y):
    return net.conv(y)


@nasty(owning(conv=lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(WIDTH, WIDTH, 1))))
def spectral_norm(net, y):
    return net.conv(y)


@nasty(owning(conv=lambda: nn.utils.parametrizations.orthogonal(nn.Conv2d(WIDTH, WIDTH, 1))))
def orthogonal_weights(net, y):
    return net.conv(y)


@nasty(owning(conv=lambda: nn.Conv2d(WIDTH, WIDTH, 1)))
def symmetric_weights(net, y):
    weight = net.conv.weight
    return F.conv2d(y, weight + weight.transpose(0, 1), net.conv.bias)


@nasty(owning(conv=lambda: nn.Conv2d(WIDTH, WIDTH, 1)))
def tied_weights_used_backwards(net, y):
    return F.conv_transpose2d(net.conv(y).relu(), net.conv.weight)


@nasty(owning(conv=lambda: nn.Conv2d(WIDTH, WIDTH, 1)))
def one_conv_called_three_times(net, y):
    for _ in range(3):
        y = y + net.conv(y).relu()
    return y


@nasty(owning(conv=lambda: nn.Conv2d(8, 8, 1)))
def one_conv_for_both_halves(net, y):
    return torch.cat([net.conv(y[:, :8]), net.conv(y[:, 8:])], 1)


@nasty(owning(conv=lambda: nn.Conv2d(WIDTH, 6, 3, padding=1)))
def as_many_calls_as_channels(net, y):
    for _ in range(y.shape[1] // 8):
        y = y + 0.1 * net.conv(y).mean(1, keepdim=True)
    return y


@nasty(owning(conv=lambda: nn.ConvTranspose2d(WIDTH, 8, 2, stride=2, groups=2)))
def transposed_conv_with_groups(net, y):
    return net.conv(y)


@nasty(owning(conv=lambda: nn.Conv3d(1, 4, (3, 1, 1), padding=(1, 0, 0))))
def conv_whose_depth_is_the_channels(net, y):
    return net.conv(y.unsqueeze(1)).flatten(1, 2)


@nasty(owning(conv=lambda: nn.Conv1d(1, 1, 3, padding=1)))
def eca_gate(net, y):
    return y * net.conv(y.mean((2, 3)).unsqueeze(1)).sigmoid().squeeze(1)[..., None, None]


# ---- shapes, branches, in place -----------------------------------------------------------------------------------


@nasty()
def channels_padded_by_a_number(net, y):
    return F.pad(y, (0, 0, 0, 0, 2, 2))


@nasty()
def channels_padded_up_to_a_width(net, y):
    return F.pad(y, (0, 0, 0, 0, 0, 24 - y.shape[1]))


@nasty()
def channels_padded_to_a_multiple(net, y):
    y = F.pad(y, (0, 0, 0, 0, 0, -y.shape[1] % 5))
    return torch.cat([y, y[:, :1] * 2], 1)


@nasty(owning(a=lambda: nn.Conv2d(WIDTH, 7, 1), b=lambda: nn.Conv2d(WIDTH, 7, 1)))
def stacked_branches(net, y):
    both = torch.stack([net.a(y), net.b(y)], 1)
    first, second = both.unbind(1)
    return first * second.sigmoid() + both.mean(1)


@nasty(owning(a=lambda: nn.Conv2d(WIDTH, 7, 1), b=lambda: nn.Conv2d(WIDTH, 7, 1)))
def branches_interleaved(net, y):
    return torch.stack([net.a(y), net.b(y)], 2).flatten(1, 2)


@nasty(owning(a=lambda: nn.Conv2d(WIDTH, 7, 1), gate=lambda: nn.Linear(WIDTH, 2 * 7)))
def selective_kernel(net, y):
    gates = net.gate(y.mean((2, 3))).view(-1, 2, 7).softmax(1)
    z = net.a(y)
    return z * gates[:, 0, :, None, None] + z.relu() * gates[:, 1, :, None, None]


@nasty()
def unbound_channels_reversed(net, y):
    return torch.stack(y.unbind(1)[::-1], 1)


@nasty()
def chunks_of_uneven_size(net, y):
    parts = y.chunk(3, 1)
    return torch.cat([part * (i + 1) for i, part in enumerate(parts)], 1)


@nasty()
def split_into_literal_uneven_sizes(net, y):
    a, b, c = y.split([4, 5, y.shape[1] - 9], 1)
    return torch.cat([c, a * 2, b * 3], 1)


@nasty()
def repeated_channels(net, y):
    return y.repeat(1, 2, 1, 1) * ramp(2 * y.shape[1]).to(y)


@nasty()
def each_channel_twice(net, y):
    return y.repeat_interleave(2, 1)


@nasty(owning(conv=lambda: nn.Conv2d(WIDTH, WIDTH, 1)))
def written_in_place_everywhere(net, y):
    z = torch.empty_like(y)
    z[:, ::2] = y[:, 1::2]
    z[:, 1::2] = net.conv(y)[:, ::2]
    return z


@nasty(owning(conv=lambda: nn.Conv2d(WIDTH, 4, 1)))
def written_at_a_literal_place(net, y):
    z = y.clone()
    z[:, 4:8] = net.conv(y)
    return z


@nasty()
def last_channels_zeroed_in_place(net, y):
    z = y.clone()
    z[:, -3:].zero_()
    return z


@nasty()
def narrowed(net, y):
    return torch.cat([y.narrow(1, 2, 6).exp(), y], 1)


@nasty()
def pixels_shuffled_up(net, y):
    return F.pixel_shuffle(y, 2)


@nasty()
def pixels_shuffled_down(net, y):
    return F.pixel_unshuffle(y, 2)


@nasty()
def folded_and_unfolded(net, y):
    return F.fold(F.unfold(y, 3, padding=1) * 0.5, y.shape[2:], 3, padding=1)


@nasty(owning(linear=lambda: nn.Linear(WIDTH * 36, 9 * 6)))
def flattened_into_a_linear(net, y):
    return net.linear(y.flatten(1)).view(y.shape[0], 6, 3, 3)


@nasty(owning(linear=lambda: nn.Linear(36, 36)))
def linear_over_pixels_of_each_channel(net, y):
    return net.linear(y.flatten(2)).view_as(y)


@nasty(owning(linear=lambda: nn.Linear(6, 6)))
def linear_over_groups_of_channels(net, y):
    return net.linear(y.permute(0, 2, 1, 3).reshape(y.shape[0], 6, -1, 6)).reshape_as(y)


@nasty()
def channels_and_pixels_change_places(net, y):
    return y.reshape(y.shape[0], 6, 6, -1).permute(0, 3, 1, 2)


@nasty()
def batch_and_channels_merged(net, y):
    z = y.reshape(-1, 4, *y.shape[2:])
    return (z + z.mean(1, keepdim=True)).view_as(y)


@nasty()
def a_view_of_as_strided(net, y):
    y = y.contiguous()
    return y.as_strided((y.shape[0], 4, 6, 6), (y.stride(0), 2 * y.stride(1), 6, 1))


# ---- numbers from widths ------------------------------------------------------------------------------------------


@nasty()
def shape_in_python_arithmetic(net, y):
    return y * (math.log2(y.shape[1]) / 4)


@nasty()
def size_of_the_batch_times_width(net, y):
    return y * (y.numel() // (y.shape[0] * 36) / 16)


@nasty()
def bytes_of_the_map(net, y):
    return y * (1.0 if y[0].nbytes >= 36 * 9 * 8 else 3.0)


@nasty()
def stride_of_the_batch(net, y):
    return y * (y.contiguous().stride(0) / 576)


@nasty()
def another_way_for_few_channels(net, y):
    return y.flip(2) if y.shape[1] < 3 else y


@nasty()
def another_way_for_exactly_eleven(net, y):
    return y * 3 if y.shape[1] == 11 else y


@nasty()
def another_way_for_multiples_of_four(net, y):
    return y * 1.5 if y.shape[1] % 4 == 0 else y


@nasty(owning(conv=lambda: nn.Conv2d(WIDTH, 9, 1)))
def width_of_a_weight_as_a_number(net, y):
    return net.conv(y) * net.conv.weight.shape[1] ** -0.5


@nasty(owning(conv=lambda: nn.Conv2d(WIDTH, 9, 1)))
def width_of_a_layer_as_a_number(net, y):
    return net.conv(y) / net.conv.in_channels


@nasty(owning(groups=lambda: 4))
def group_norm_whose_groups_follow_the_width(net, y):
    return F.group_norm(y, math.gcd(y.shape[1], 4))


@nasty()
def group_norm_of_literal_groups(net, y):
    return F.group_norm(y, 4)


@nasty()
def layer_norm_over_everything(net, y):
    return F.layer_norm(y, y.shape[1:])


@nasty()
def instance_norm_of_groups(net, y):
    z = y.view(y.shape[0], 4, -1)
    return ((z - z.mean(-1, keepdim=True)) / (z.std(-1, keepdim=True) + 0.1)).view_as(y)


@nasty(owning(reduce=lambda: nn.Conv2d(WIDTH, WIDTH // 4, 1), expand=lambda: nn.Conv2d(WIDTH // 4, WIDTH, 1)))
def gate_with_a_fixed_reduction(net, y):
    z = net.reduce(y.mean((2, 3), keepdim=True))
    if z.shape[1] != y.shape[1] // 4:
        z = z * 2
    return y * net.expand(z.relu()).sigmoid()


@nasty(owning(drop=lambda: nn.Dropout2d(0.5), alpha=lambda: nn.FeatureAlphaDropout(0.3)))
def dropout_layers(net, y):
    return net.alpha(net.drop(y))


@nasty()
def dropout_that_is_always_on(net, y):
    return F.dropout2d(y, 0.5, training=True)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.cat([x[:, :8] * 2, x[:, 8:]], 1)

    @staticmethod
    def backward(ctx, gradient):
        return torch.cat([gradient[:, :8] * 2, gradient[:, 8:]], 1)


@nasty()
def custom_autograd_function(net, y):
    return Doubled.apply(y)


@nasty()
def through_numpy(net, y):
    import numpy as np

    weights = np.arange(1, y.shape[1] + 1) / y.shape[1]
    return y * torch.from_numpy(weights).to(y).view(1, -1, 1, 1)


@nasty()
def through_numpy_values(net, y):
    import numpy as np

    return y * torch.from_numpy(np.cumsum(y.detach().double().numpy(), 1)).to(y).tanh()


@nasty()
def through_a_python_list(net, y):
    means = y.mean((0, 2, 3)).tolist()
    return y * (1 + means[0]) + sum(means[8:])


@nasty()
def a_value_decides(net, y):
    return y * 2 if float(y.mean()) > -100 else y[:, :8]


@nasty(owning(head=lambda: nn.MultiheadAttention(WIDTH, 4, batch_first=True)))
def torch_attention_with_a_skip(net, y):
    z = y.flatten(2).transpose(1, 2)
    return y + net.head(z, z, z)[0].transpose(1, 2).reshape(y.shape)


@nasty(owning(layer=lambda: nn.TransformerEncoderLayer(WIDTH, 4, 24, batch_first=True)))
def torch_encoder_layer(net, y):
    return net.layer(y.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(y.shape)


@nasty(owning(mix=lambda: nn.Parameter(torch.randn(4, 4))))
def groups_mixed_by_a_weight(net, y):
    z = y.view(y.shape[0], 4, -1, *y.shape[2:])
    return torch.einsum("bgchw,gk->bkchw", z, net.mix).reshape(y.shape)


@nasty()
def outer_product_of_halves(net, y):
    a, b = y[:, :4], y[:, 4:7]
    return (a.unsqueeze(2) * b.unsqueeze(1)).flatten(1, 2)


@nasty()
def max_out(net, y):
    return y.view(y.shape[0], -1, 2, *y.shape[2:]).amax(2)


@nasty()
def concatenated_relu(net, y):
    return torch.cat([y, -y], 1).relu()


@nasty()
def ghost_channels_of_a_literal_number(net, y):
    return torch.cat([y, y.tanh()], 1)[:, :20]


@nasty()
def ghost_channels_back_to_the_width(net, y):
    return torch.cat([y[:, : y.shape[1] // 2], y.tanh()], 1)[:, : y.shape[1]]


@nasty(owning(conv=lambda: nn.Conv2d(WIDTH, WIDTH, 1, groups=4)))
def shuffle_between_grouped_convs(net, y):
    return net.conv(F.channel_shuffle(net.conv(y), 4))
