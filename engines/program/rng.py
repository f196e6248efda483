"""Counter-based random numbers: a function of the step, the draw and the whole-image position, on any rank.

The mask of a dropout is therefore the same for every tiling, and a stage may recompute it. The generator is SplitMix64
(Steele, Lea and Flood, 2014, "Fast splittable pseudorandom number generators", OOPSLA, figure 17), whose state after i
steps has a closed form: position i of a tensor gets the i-th number.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mpi4dl_nb.engines.geometry.places import Ranges
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, Node
from mpi4dl_nb.engines.program.kernels import get_kernel, get_operator, has_kernel, register_kernel

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 1 << 64


def _to_signed(word: int) -> int:
    word %= _WORD
    return word - _WORD if word >= _WORD >> 1 else word


def _mix(word: int) -> int:
    """Apply SplitMix64's finaliser, which is Stafford's 13th variant of MurmurHash3's.

    >>> hex(_mix(0x9E3779B97F4A7C15))
    '0xe220a8397b1dcdaf'
    """
    word = ((word ^ (word >> 30)) * _FIRST) % _WORD
    word = ((word ^ (word >> 27)) * _SECOND) % _WORD
    return word ^ (word >> 31)


def compute_step_seed(seed: int, step: int) -> int:
    """Return the seed of one training step."""
    return _mix((_mix(seed % _WORD) + step * _GOLDEN) % _WORD)


def _shift_right(word: Tensor, by: int) -> Tensor:
    """Shift right by `by` bits and fill with zeros; `>>` on int64 would keep the sign."""
    return (word >> by).bitwise_and_((1 << (64 - by)) - 1)


def number_positions(place: Ranges, device: torch.device) -> Tensor:
    """Return the row-major index, in the whole tensor, of each position in `place`.

    >>> number_positions([(4, 1, 3), (6, 0, 2)], torch.device("cpu"))
    tensor([[ 6,  7],
            [12, 13]])
    """
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, start, stop in place:
        index = index[..., None] * size + torch.arange(start, stop, device=device)
    return index


def sample_uniform(seed: int, draw: int, place: Ranges, device: torch.device) -> Tensor:
    """Return numbers of [0, 1) in float64, multiples of 2 ** -53, for the positions in `place`."""
    # A tile draws what the whole image draws there.
    return sample_numbered(seed, draw, number_positions(place, device))


def sample_numbered(seed: int, draw: int, index: Tensor) -> Tensor:
    """Return the numbers of `sample_uniform` for positions given by their row-major index, which is overwritten."""
    # state = seed + (index + 1) * golden, then the finaliser. int64 wraps around as uint64 does.
    word = index.add_(1).mul_(_to_signed(_GOLDEN)).add_(_to_signed(compute_step_seed(seed, draw)))
    word = word.bitwise_xor_(_shift_right(word, 30)).mul_(_to_signed(_FIRST))
    word = word.bitwise_xor_(_shift_right(word, 27)).mul_(_to_signed(_SECOND))
    word = word.bitwise_xor_(_shift_right(word, 31))
    return _shift_right(word, 11).double().mul_(2.0**-53)


Draw = Callable[[], Tensor]


def _sample_range(draw: Draw, a: Mapping[str, Any]) -> Tensor:
    low, high = a.get("from", 0.0), a.get("to", 1.0)
    return draw() * (high - low) + low


_LAWS: dict[str, Callable[[Draw, Mapping[str, Any]], Tensor]] = {
    **dict.fromkeys(("rand", "rand_like", "uniform"), _sample_range),
    **dict.fromkeys(
        ("randn", "randn_like", "normal_functional", "normal"),
        # Box and Muller, 1958 (Annals of Mathematical Statistics 29), equation 1.
        lambda draw, a: (
            draw().neg_().log1p_().mul_(-2).sqrt_() * draw().mul_(2 * math.pi).cos_() * a.get("std", 1.0)
            + a.get("mean", 0.0)
        ),
    ),
    "randint": lambda draw, a: (draw() * (a["high"] - a.get("low", 0))).floor_() + a.get("low", 0),
    "bernoulli": lambda draw, a: (draw() < a["p"]).double(),
    "exponential": lambda draw, a: draw().neg_().log1p_().div_(-a.get("lambd", 1.0)),
}
SETTINGS = ("p", "from", "to", "mean", "std", "low", "high", "lambd")
"""The arguments that a law reads; a tensor of probabilities is also passed as `p`."""

_DRAWN = (
    "rand.default rand_like.default uniform.default randn.default randn_like.default normal_functional.default "
    "randint.default randint.low bernoulli.default bernoulli.p exponential.default dropout.default "
    "feature_dropout.default alpha_dropout.default feature_alpha_dropout.default rrelu.default"
)
draws = tuple(f"aten.{name}" for name in _DRAWN.split())
"""The operators that draw by position."""

_ATTENTION = "aten.scaled_dot_product_attention.default"
"""The operator that drops some of its weights, if it has dropout."""


@register_kernel("tile.draw")
def sample_at(
    seed: int, number: int, place: Ranges, device: torch.device, name: str, dtype: torch.dtype, **arguments: Any
) -> Tensor:
    """Return the part at `place` of what the operator `name` draws."""
    # Box and Muller's law takes two numbers for each position, hence two streams for each draw of the model.
    streams = iter((2 * number, 2 * number + 1))
    drawn = _LAWS[name](lambda: sample_uniform(seed, next(streams), place, device), arguments)
    if dtype.is_floating_point and torch.finfo(dtype).bits < 64 and name in ("rand", "rand_like", "uniform"):
        return drawn.sub_(drawn.remainder(torch.finfo(dtype).eps)).to(dtype)  # rounded down, so that 1 is never drawn
    return drawn.to(dtype)


@register_kernel("tile.dropout")
def dropout(x: Tensor, seed: int, number: int, place: Ranges, device: torch.device, p: float, alpha: bool) -> Tensor:
    """Multiply `x` by a mask that is 0 with probability `p`, as ATen does."""
    noise = (sample_uniform(seed, 2 * number, place, device) < 1 - p).to(x.dtype)
    if not alpha:
        return x * noise.div_(1 - p)
    low = 1.7580993408473766  # Klambauer et al., 2017 (arXiv:1706.02515), equation 14: the lowest value of a SELU
    gain = 1 / math.sqrt((low * low * p + 1) * (1 - p))
    shift = noise.sub(1).mul_(low * gain).add_(low * gain * p)
    return x * noise.mul_(gain) + shift


@register_kernel("tile.rrelu")
def rrelu(x: Tensor, seed: int, number: int, place: Ranges, device: torch.device, lower: float, upper: float) -> Tensor:
    """Multiply non-positive values by slopes drawn between the two bounds (Xu et al., 2015, arXiv:1505.00853)."""
    return x * _compute_slopes(x, sample_uniform(seed, 2 * number, place, device), lower, upper)


def _compute_slopes(x: Tensor, drawn: Tensor, lower: float, upper: float) -> Tensor:
    return torch.where(x <= 0, _sample_range(lambda: drawn, {"from": lower, "to": upper}).to(x.dtype), 1.0)


def _is_random(node: Node) -> bool:
    a = node.arguments
    if node.operator == _ATTENTION:
        return bool(0 < a["dropout_p"] < 1)
    if node.operator not in draws:
        return False
    if "training" in a:
        return bool(a["training"])
    return bool(a["train"]) and 0 < a["p"] < 1 if "train" in a else True


def find_sample_number(graph: ModelGraph, node: Node) -> int | None:
    """Return the number of draws before this node in the model; None if the node draws nothing."""
    if not _is_random(node):
        return None
    return [other.name for other in graph.nodes if _is_random(other)].index(node.name)


def has_random_ops(graph: ModelGraph) -> bool:
    """Return whether a model draws random numbers by position."""
    return any(_is_random(node) for node in graph.nodes)


# Operators that draw from PyTorch's own generator, such as attention with dropout or an LSTM. They run on one rank, and
# the generator is seeded for each of them: a recomputation, or a resumed training, draws the same numbers.


_ONE_DRAW_AT_A_TIME = threading.Lock()  # a process has one generator; ranks may be threads


def uses_generator(node: Node) -> bool:
    """Return whether a node draws random numbers from PyTorch's generator, unless a rule for `draws` lowers it."""
    if has_kernel(node.operator) or node.operator == "getitem":
        return False
    draws_nothing = any(node.arguments.get(name) == 0 for name in ("dropout_p", "dropout", "train", "training"))
    return not draws_nothing and torch.Tag.nondeterministic_seeded in get_operator(node.operator).tags


def make_seeded_arguments(node: Node, kernel: str) -> tuple[int, str]:
    """Return the stream and the kernel of a node, as `run_seeded` takes them."""
    # `sample_at` has the streams from 0 on.
    return -1 - zlib.crc32(node.name.encode()), kernel


@register_kernel("tile.seeded")
def run_seeded(seed: int, device: torch.device, stream: int, kernel: str, /, *arguments: Any, **keywords: Any) -> Any:
    """Run a kernel with the device's generator seeded for this step, micro-batch and node."""
    with _seed_generator(compute_step_seed(seed, stream), device):
        return get_kernel(kernel)(*arguments, **keywords)


@contextmanager
def _seed_generator(seed: int, device: torch.device) -> Iterator[None]:
    """Within the context, the generator of a device starts from `seed`; its state is restored afterwards."""
    if device.type == "meta":  # has none
        yield
        return
    generator = torch.default_generator
    if device.type != "cpu":
        module = torch.get_device_module(device)
        is_numbered = device != torch.device(device.type)
        generator = module.default_generators[device.index if is_numbered else module.current_device()]
    with _ONE_DRAW_AT_A_TIME:
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)


class CounterRNGMode(TorchDispatchMode):
    """Within the mode, a plain model in one process draws what its tiles draw, so that it can be their oracle.

    `step` is the number of a micro-batch. A model that gets `count` of them at once, from that one on, draws for the
    images of each what it would draw for them alone.
    """

    def __init__(self, seed: int, step: int = 1, count: int = 1) -> None:
        super().__init__()
        self.seeds, self.number = [compute_step_seed(seed, step + part) for part in range(count)], 0

    def _draw(self, shape: Sequence[int], draw: Callable[[int, Ranges], Tensor]) -> Tensor:
        """Return the draws for all images; `draw(seed, place)` makes those of one micro-batch."""
        if len(self.seeds) == 1:
            return draw(self.seeds[0], [(size, 0, size) for size in shape])
        part = [shape[0] // len(self.seeds), *shape[1:]]
        return torch.cat([draw(seed, [(size, 0, size) for size in part]) for seed in self.seeds])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        law = name.removesuffix("_")
        if law == "rrelu_with_noise" and any(args[4:5]):
            x, noise, lower, upper = args[:4]
            drawn = self._draw(x.shape, lambda seed, place: sample_uniform(seed, 2 * self.number, place, x.device))
            noise.copy_(_compute_slopes(x, drawn, lower, upper))  # ATen's backward reads the slopes there
            self.number += 1
            return x.mul_(noise) if name.endswith("_") else x * noise
        output = func(*args, **(kwargs or {}))
        if law not in _LAWS:
            return output
        schema = func._schema.arguments
        arguments = {s.name: s.default_value for s in schema}  # ATen omits default arguments
        arguments |= {s.name: value for s, value in zip(schema, args, strict=False)} | (kwargs or {})
        settings = {name: arguments[name] for name in SETTINGS if arguments.get(name) is not None}
        if func._schema.name == "aten::bernoulli" and "p" not in settings:
            settings["p"] = args[0]
        drawn = self._draw(
            output.shape,
            lambda seed, place: sample_at(seed, self.number, place, output.device, law, output.dtype, **settings),
        )
        self.number += 1
        return output.copy_(drawn) if name.endswith("_") else drawn
