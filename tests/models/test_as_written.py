"""Models and losses as people write them, under every kind of plan: three steps are those of a plain PyTorch loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.compiler.stages import find_layers
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.graph.trace import trace
from mpi4dl_nb.engines.plan import Plan

SIZE_PX = (25, 22)  # which no grid here cuts evenly


def make_conv(channels: int, out: int, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(channels, out, size, padding=size // 2)


class Segments(nn.Module):
    """`middle` between convolutions; it may have modules of its own."""

    def __init__(self, middle: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.second = make_conv(3, 4), nn.BatchNorm2d(4), make_conv(4, 4)
        self.third, self.last = make_conv(4, 4), nn.Conv2d(4, 3, 1)
        self.middle = middle
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = self.middle(self, self.second(x))
        return self.last(F.relu(self.third(x)))


class Frozen(nn.Module):
    """A backbone under `torch.no_grad()`, whose weights nobody froze, and a head that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            make_conv(3, 4), nn.ReLU(), make_conv(4, 4), nn.BatchNorm2d(4), nn.ReLU(), make_conv(4, 4)
        )
        self.head = nn.Sequential(make_conv(4, 4), nn.ReLU(), nn.Conv2d(4, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)


class Teacher(nn.Module):
    """A student that learns from a teacher; one layer of theirs is the same, and learns as the student's alone."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.student = make_conv(3, 4), nn.Sequential(make_conv(4, 4), nn.ReLU(), nn.Conv2d(4, 3, 1))
        self.teacher = copy.deepcopy(self.student)

    def forward(self, x: Tensor) -> Tensor:
        y = self.student(F.relu(self.shared(x)))
        with torch.no_grad():
            aim = self.teacher(F.relu(self.shared(x))).softmax(1)
        return y * aim


class Normalised(nn.Module):
    """Pictures normalised by constants that no `state_dict` has, in place and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.tensor([0.5, 0.4, 0.3], dtype=torch.float64).view(3, 1, 1)
        self.net = nn.Sequential(make_conv(3, 4), nn.ReLU(), make_conv(4, 4), nn.ReLU(), nn.Conv2d(4, 3, 1))

    @torch.no_grad()
    def normalise(self, x: Tensor) -> Tensor:
        x = x.clone().sub_(self.mean)
        return x.div_(x.new_tensor([0.2, 0.3, 0.4]).view(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.normalise(x[:, [2, 1, 0]]))


def move_channels(_: nn.Module, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, :2] = x[:, 2:]
    y[:, 2:] = x[:, :2]
    return y


def move_rows(_: nn.Module, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :, 1:] = x[:, :, :-1]
    y[:, :, :, -1] *= 2
    y[y < -0.5] = 0
    return y


def drop_in_place(_: nn.Module, x: Tensor) -> Tensor:
    """In place behind a dropout, which draws the same on tiles as on the whole image."""
    y = F.dropout(x, 0.0)
    y *= torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=x.dtype).view(4, 1, 1)
    return y


def scale_by_itself(_: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        weight = torch.sigmoid(x) * 2
        with torch.enable_grad():
            y = x * 3
        weight[:, :, ::2] += 1
    return y * weight + x


def normalise_without_autocast(_: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return x * x.square().mean((2, 3), keepdim=True).add(1).rsqrt()


def subtract_means_of_listed_axes(_: nn.Module, x: Tensor) -> Tensor:
    axes = torch.arange(2, x.dim()).tolist()
    scale = torch.linspace(1, 2, int(torch.tensor(x.shape[1]))).to(x)
    return x * scale.view(-1, 1, 1) - x.mean(axes, keepdim=True)


def compute_window_attention(net: nn.Module, x: Tensor, window: int = 4) -> Tensor:
    """Swin's shifted windows (Liu et al., 2021, arXiv:2103.14030), as torchvision writes them."""
    x = x.permute(0, 2, 3, 1)
    n, height, width, channels = x.shape
    padded = F.pad(x, (0, 0, 0, -width % window, 0, -height % window))
    rows, cols = padded.shape[1:3]
    shift = window // 2
    padded = torch.roll(padded, (-shift, -shift), (1, 2))

    def cut(y: Tensor) -> Tensor:
        y = y.view(-1, rows // window, window, cols // window, window, y.shape[-1])
        return y.permute(0, 1, 3, 2, 4, 5).reshape(-1, window * window, y.shape[-1])

    mask = padded.new_zeros((rows, cols))
    spans = ((0, -window), (-window, -shift), (-shift, None))
    for count, (top, left) in enumerate((top, left) for top in spans for left in spans):
        mask[top[0] : top[1], left[0] : left[1]] = count
    windows = cut(mask[None, :, :, None]).squeeze(-1)
    apart = windows[:, None] - windows[:, :, None]
    apart = apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0)
    q, k, v = net.qkv(cut(padded)).chunk(3, -1)
    scores = q @ k.transpose(1, 2) / channels**0.5
    scores = (scores.view(n, -1, *scores.shape[1:]) + apart).view_as(scores)
    y = net.out(scores.softmax(-1) @ v)
    y = y.view(n, rows // window, cols // window, window, window, channels).permute(0, 1, 3, 2, 4, 5)
    y = torch.roll(y.reshape(n, rows, cols, channels), (shift, shift), (1, 2))
    return y[:, :height, :width].permute(0, 3, 1, 2)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "frozen backbone": Frozen,
    "teacher": Teacher,
    "normaliser": Normalised,
    "channels shifted": lambda: Segments(move_channels),
    "rows moved": lambda: Segments(move_rows),
    "dropout and a constant": lambda: Segments(drop_in_place),
    "weights without gradient": lambda: Segments(scale_by_itself),
    "autocast off": lambda: Segments(normalise_without_autocast),
    "axes by a list": lambda: Segments(subtract_means_of_listed_axes),
    "window attention": lambda: Segments(compute_window_attention, qkv=nn.Linear(4, 12), out=nn.Linear(4, 4)),
}
ACROSS_STAGES = ("frozen backbone", "rows moved")


def make_tile_plan(grid: str, split: int = 1, **more: object) -> Plan:
    return Plan(split_size=split, spatial_size=1, slice_method=grid, precision="float64", **more)


PLANS = {
    "tiles": make_tile_plan("2x2"),
    "strips, computed again": make_tile_plan("3x1", checkpoint_activations=True),
    "fused": make_tile_plan("2x2", halo_d2=True, fused_layers=2),
    "overlapped": make_tile_plan("1x4", overlap_halos=True),
    "two stages": make_tile_plan("1x3", split=2),
    "layers": Plan(split_size=3, spatial_size=0, precision="float64"),
    "zero bubble": Plan(split_size=2, spatial_size=0, parts=2, schedule="zero_bubble", precision="float64"),
}


@pytest.fixture(scope="module")
def clusters() -> Iterator[dict[int, Cluster]]:
    made = {count: Cluster(count, backend="loopback").start() for count in (1, 2, 3, 4)}
    yield made
    for cluster in made.values():
        cluster.stop()


sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)


def assert_trains_as_plain_pytorch(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], plan: Plan, clusters: dict[int, Cluster],
    labels: Tensor | None = None, rel: float = 1e-11,
) -> None:  # fmt: skip
    random = torch.Generator().manual_seed(7)
    images = torch.randn(2, 3, *SIZE_PX, generator=random, dtype=torch.float64)
    labels = torch.randint(0, 3, (2, *SIZE_PX), generator=random) if labels is None else labels
    plain = copy.deepcopy(model)
    optimiser, losses = sgd(plain.parameters()), []
    for _ in range(3):
        optimiser.zero_grad()
        parts = zip(images.chunk(plan.parts), labels.chunk(plan.parts), strict=True)
        found = [loss(plain(x), y) / plan.parts for x, y in parts]
        for part in found:
            part.backward()
        optimiser.step()
        losses.append(sum(part.item() for part in found))
    spec = TensorSpec(tuple(labels.shape), str(labels.dtype).removeprefix("torch."))
    training = Training(model, plan, clusters[plan.ranks], tuple(images.shape), loss=loss, optimiser=sgd, labels=spec)
    assert [training.step(images, labels) for _ in range(3)] == pytest.approx(losses, rel=rel)
    state = training.state_dict()
    training.close()
    wanted = plain.state_dict()
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.allclose(state[name].to(tensor.dtype), tensor, rtol=10 * rel, atol=rel / 10), name


@pytest.mark.nightly
@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_as_people_write_it(name: str, kind: str, clusters: dict[int, Cluster]):
    torch.manual_seed(1)
    assert_trains_as_plain_pytorch(MODELS[name]().double(), F.cross_entropy, PLANS[kind], clusters)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ACROSS_STAGES)
def test_stages_end_anywhere(name: str, clusters: dict[int, Cluster]):
    """Within a region without gradients, and right behind what was assigned."""
    labels = TensorSpec((2, *SIZE_PX), "int64")
    graph = trace(MODELS[name](), F.cross_entropy, TensorSpec((2, 3, *SIZE_PX), "float64"), labels)
    count = len(find_layers(graph))
    assert count > 2
    for head in range(1, count):
        torch.manual_seed(1)
        balance = (head, count - head)
        plan = Plan(split_size=2, spatial_size=1, slice_method="1x2", balance=balance, precision="float64")
        assert_trains_as_plain_pytorch(MODELS[name]().double(), F.cross_entropy, plan, clusters)


WEIGHTS = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)


def compute_focal_loss(prediction: Tensor, labels: Tensor) -> Tensor:
    entropy = F.cross_entropy(prediction, labels, reduction="none")
    with torch.no_grad():
        weight = 1 - torch.exp(-entropy)
    return (entropy * weight).mean()


@torch.no_grad()
def compute_hardness(entropy: Tensor) -> Tensor:
    return entropy.clamp_max(2.0)


def compute_loss_without_autocast(prediction: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.cross_entropy(prediction.to(torch.float64), labels)


def compute_loss_with_decorator(prediction: Tensor, labels: Tensor) -> Tensor:
    entropy = F.cross_entropy(prediction, labels, reduction="none")
    return (entropy * compute_hardness(entropy)).mean()


def compute_loss_without_void(prediction: Tensor, labels: Tensor) -> Tensor:
    entropy = F.cross_entropy(prediction, labels, reduction="none")
    entropy = entropy.clone()
    entropy[labels == 2] = 0
    return entropy.mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weights made in the loss": lambda o, y: F.cross_entropy(o, y, weight=torch.tensor([1.0, 2.0, 0.5]).to(o)),
    "weights of a closure": lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS),
    "focal, without gradient": compute_focal_loss,
    "decorated": compute_loss_with_decorator,
    "autocast off": compute_loss_without_autocast,
    "one hot by scatter_": lambda o, y: F.mse_loss(o, torch.zeros_like(o).scatter_(1, y[:, None], 1.0)),
    "void pixels by assignment": compute_loss_without_void,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_as_people_write_it(name: str, clusters: dict[int, Cluster]):
    for plan in (PLANS["tiles"], PLANS["two stages"]):
        torch.manual_seed(1)
        model = nn.Sequential(make_conv(3, 4), nn.ReLU(), make_conv(4, 4), nn.ReLU(), nn.Conv2d(4, 3, 1)).double()
        assert_trains_as_plain_pytorch(model, LOSSES[name], plan, clusters)


MONAI = {
    "DiceLoss": {"softmax": True},
    "DiceCELoss": {"softmax": True},
    "GeneralizedDiceLoss": {"softmax": True},
    "TverskyLoss": {"softmax": True, "batch": True},
    "FocalLoss": {"use_softmax": True, "gamma": 1.5},
}


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "weighted"), [*((name, False) for name in MONAI), ("DiceCELoss", True)])
def test_monai_losses(name: str, weighted: bool, clusters: dict[int, Cluster]):
    losses = pytest.importorskip("monai.losses")
    more = {"weight": torch.tensor([1.0, 2.0, 3.0])} if weighted else {}
    loss = getattr(losses, name)(to_onehot_y=True, **MONAI[name], **more)
    labels = torch.randint(0, 3, (2, 1, *SIZE_PX), generator=torch.Generator().manual_seed(3))
    rel = 1e-6 if name == "FocalLoss" else 1e-11  # it computes in float32, whatever it is given
    for plan in (PLANS["tiles"], PLANS["two stages"]):
        torch.manual_seed(1)
        model = nn.Sequential(make_conv(3, 4), nn.ReLU(), make_conv(4, 4), nn.ReLU(), nn.Conv2d(4, 3, 1)).double()
        assert_trains_as_plain_pytorch(model, copy.deepcopy(loss).double(), plan, clusters, labels, rel)
