"""Tensors that a model's code keeps outside of the model: a trace leaves none of its own there."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb import Cluster, Plan, Training, forecast
from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.graph.outside_state import OutsideState, holds_tensor
from mpi4dl_nb.engines.graph.trace import infer_output_spec, trace, trace_inference
from mpi4dl_nb.engines.graph.traceability import check_side_effects
from mpi4dl_nb.engines.graph.working_sizes import can_run
from tests.graph import keeping

SHAPE = 2, 3, 8, 12


def make(h: int, w: int) -> Tensor:
    return torch.arange(h * w).view(1, 1, h, w).float() / (h * w)


@functools.lru_cache
def keep_in_cache(h: int, w: int) -> Tensor:
    return make(h, w)


@functools.lru_cache(maxsize=1)
def keep_the_last(h: int, w: int) -> tuple[Tensor, str]:
    return make(h, w), "of the last size"


_BY_SIZE: dict[tuple[int, int], Tensor] = {}
_LISTED: list[Any] = []
_LAST: Tensor | None = None
_SIZE: tuple[int, int] | None = None
_STATE = {"size": (0, 0)}
_THREAD = threading.local()


def keep_by_size(h: int, w: int) -> Tensor:
    if (h, w) not in _BY_SIZE:
        _BY_SIZE[h, w] = make(h, w)
    return _BY_SIZE[h, w]


def keep_in_list(h: int, w: int) -> Tensor:
    if not _LISTED or _STATE["size"] != (h, w):
        _LISTED[:] = [make(h, w)]
        _STATE["size"] = h, w
    return _LISTED[0]  # type: ignore[no-any-return]


def keep_in_globals(h: int, w: int) -> Tensor:
    global _LAST, _SIZE
    if _LAST is None or (h, w) != _SIZE:
        _LAST, _SIZE = make(h, w), (h, w)
    return _LAST


def keep_in_thread(h: int, w: int) -> Tensor:
    if not hasattr(_THREAD, "kept"):
        _THREAD.kept = {}
    if (h, w) not in _THREAD.kept:
        _THREAD.kept[h, w] = make(h, w)
    return _THREAD.kept[h, w]  # type: ignore[no-any-return]


def make_closure() -> Callable[[int, int], Tensor]:
    kept = None

    def keep(h: int, w: int) -> Tensor:
        nonlocal kept
        if kept is None or kept.shape[-2:] != (h, w):
            kept = make(h, w)
        return kept

    return keep


def keep_in_function(h: int, w: int) -> Tensor:
    if not hasattr(keep_in_function, "kept"):
        keep_in_function.kept = make(h, w)  # type: ignore[attr-defined]
    return keep_in_function.kept  # type: ignore[attr-defined, no-any-return]


class Keeper:
    """An object that all models share: it is copied with none of them."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def __deepcopy__(self, memo: object) -> Keeper:
        return self

    def __call__(self, h: int, w: int) -> Tensor:
        if self.kept is None:
            self.kept = make(h, w)
        return self.kept


class Positions(nn.Module):
    """Keeps a tensor in its class, and another one in a cache of its method."""

    kept: Tensor | None = None

    def forward(self, h: int, w: int) -> Tensor:
        if Positions.kept is None:
            Positions.kept = self.compute(h, w)
        return Positions.kept

    @functools.lru_cache  # noqa: B019
    def compute(self, h: int, w: int) -> Tensor:
        return make(h, w)


class Net(nn.Module):
    def __init__(self, positions: Any) -> None:
        super().__init__()
        self.conv, self.head, self.positions = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 2), positions

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        found = self.positions(*y.shape[-2:])
        return self.head((y + (found[0] if isinstance(found, tuple) else found).to(y.dtype)).mean((2, 3)))


KEEPERS: dict[str, Callable[[], Any]] = {
    "lru_cache": lambda: keep_in_cache,
    "the last result": lambda: keep_the_last,
    "dict": lambda: keep_by_size,
    "list": lambda: keep_in_list,
    "globals": lambda: keep_in_globals,
    "thread": lambda: keep_in_thread,
    "closure": make_closure,
    "function": lambda: keep_in_function,
    "object": Keeper,
    "class": Positions,
    "module of a package": lambda: keeping.get_positions,
    "import within a function": lambda: keeping.import_positions,
}


@pytest.fixture(autouse=True)
def empty_caches():
    yield
    for cache in (keep_in_cache, keep_the_last, Positions.compute, keeping.keep_positions):
        cache.cache_clear()
    for held in (_BY_SIZE, _LISTED, vars(_THREAD), vars(keep_in_function), keeping.KEPT):
        held.clear()
    globals().update(_LAST=None, _SIZE=None)
    _STATE["size"], Positions.kept = (0, 0), None


def check_unchanged(model: Net) -> None:
    images = torch.randn(SHAPE)
    made = model(images)
    assert type(made) is Tensor
    assert torch.equal(made, model.head((model.conv(images) + make(*SHAPE[2:])).mean((2, 3))))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", KEEPERS)
def test_the_model_gives_what_it_gave_before(name: str):
    model = Net(KEEPERS[name]())
    TraceCache(model, SHAPE, nn.CrossEntropyLoss()).get_graph(Plan(split_size=1, precision="float64"))
    check_unchanged(model)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [(6, 6), SHAPE[2:]], ids=["another size", "the same size"])
@pytest.mark.parametrize("name", ["lru_cache", "the last result", "list", "globals"])
def test_what_the_plain_model_has_kept_does_not_confuse_a_trace(name: str, size: tuple[int, int]):
    model = Net(KEEPERS[name]())
    model(torch.randn(2, 3, *size))
    TraceCache(model, SHAPE, nn.CrossEntropyLoss()).get_graph(Plan(split_size=1, precision="float64"))
    check_unchanged(model)


def test_each_trace_by_itself_leaves_nothing():
    model = Net(keep_in_cache)
    infer_output_spec(model, TensorSpec(SHAPE, "float32"))
    check_unchanged(model)
    keep_in_cache.cache_clear()
    trace_inference(model, TensorSpec(SHAPE, "float32"))
    check_unchanged(model)
    keep_in_cache.cache_clear()
    check_side_effects(model, TensorSpec(SHAPE, "float32"))
    check_unchanged(model)
    keep_in_cache.cache_clear()
    assert not can_run(model, TensorSpec((2, 5, 8, 12), "float32"))
    assert can_run(model, TensorSpec(SHAPE, "float32"))
    check_unchanged(model)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["lru_cache", "globals", "list", "class"])
def test_a_training_goes_on_beside_the_plain_model(name: str):
    model, images, labels = Net(KEEPERS[name]()), torch.randn(SHAPE), torch.tensor([0, 1])
    plan = Plan(split_size=1, slice_method="1x2", precision="float64")
    with Cluster(2, backend="loopback") as cluster:
        training = Training(model, plan, cluster, SHAPE)
        first = training.step(images, labels)
        assert type(model(images)) is Tensor
        assert training.verify()["ok"]
        assert training.step(images, labels) < first  # what forward keeps is no change of the model
    forecast(model, plan, SHAPE, "Summit")
    assert type(model(images)) is Tensor


@pytest.mark.parametrize("name", ["lru_cache", "globals", "dict"])
def test_a_trace_that_fails_leaves_nothing_either(name: str):
    model = Net(KEEPERS[name]())
    with pytest.raises(TraceError, match="cannot be traced"):
        trace(model, nn.CrossEntropyLoss(), TensorSpec((2, 5, 8, 12), "float32"), TensorSpec((2,), "int64"))
    with pytest.raises(TraceError, match="the loss fails"):
        trace(model, nn.CrossEntropyLoss(), TensorSpec(SHAPE, "float32"), TensorSpec((3,), "int64"))
    assert type(model(torch.randn(SHAPE))) is Tensor


def test_a_hook_that_notes_activations_has_none_of_a_trace():
    model = Net(make)
    noted: dict[str, Any] = {"conv": torch.zeros(1), "last": []}
    before = noted["conv"]

    def record_activations(module: nn.Module, given: object, made: Tensor) -> None:
        noted["conv"] = made.detach()
        noted["last"].append(made)

    model.conv.register_forward_hook(record_activations)
    TraceCache(model, SHAPE, nn.CrossEntropyLoss()).get_graph(Plan(split_size=1))
    assert noted["conv"] is before
    assert noted["last"] == []


def test_what_a_loss_keeps_is_put_back():
    kept: dict[str, Tensor] = {}

    def compute_loss(p: Tensor, y: Tensor) -> Tensor:
        if "weights" not in kept:
            kept["weights"] = torch.linspace(1, 2, p.shape[1])
        return nn.functional.cross_entropy(p, y, kept["weights"].to(p.dtype))

    TraceCache(Net(make), SHAPE, compute_loss).get_graph(Plan(split_size=1))
    assert kept == {}


def test_what_was_kept_before_and_counters_stay():
    """Only a trace that stores a tensor is undone: a count of calls is none of its business."""
    counts, kept = {"calls": 0}, {"first": torch.ones(1)}

    def keep(h: int, w: int) -> Tensor:
        counts["calls"] += 1
        return make(h, w) * kept["first"]

    first = kept["first"]
    trace_inference(Net(keep), TensorSpec(SHAPE, "float32"))
    assert counts["calls"] > 0
    assert kept["first"] is first


def test_an_order_of_a_dict_and_its_entries_are_restored():
    held = {"a": torch.zeros(1), "b": 1}
    before = dict(held)

    def replace_entries() -> None:
        held.clear()
        held.update(c=torch.ones(1), b=2)

    state = OutsideState(replace_entries)
    replace_entries()
    state.restore()
    assert held == before


def test_tensors_are_found_a_few_levels_deep():
    assert holds_tensor({"a": [Keeper(), (1, torch.zeros(1))]})
    assert holds_tensor(nn.Linear(2, 2))
    assert not holds_tensor({"a": [Keeper(), (1, "b")]})


def test_the_walk_is_bounded():
    """The search looks at the nearest things first, and at no more than a fixed number."""
    many = [[Keeper()] for _ in range(9_000)]
    assert len(OutsideState(lambda: many)._seen) <= 12_000
