"""What a model keeps and changes while it runs: done as one process does it, or refused before a rank starts."""

from __future__ import annotations

import copy
import random
import threading
import time

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.graph.traceability import check_side_effects, make_traceable
from mpi4dl_nb.engines.plan import Plan

# Of torch 2.14: what is told of TorchScript is not what is tried here.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:FutureWarning")

SHAPE = (4, 3, 8, 10)
ONE = Plan(split_size=1, spatial_size=0, precision="float64")
HALVES = Plan(split_size=1, spatial_size=0, parts=2, precision="float64")


class Keeping(nn.Module):
    """A convolution whose forward pass a function does, with a buffer, a norm and a number."""

    def __init__(self, run) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(3)
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("seen", torch.zeros(()))
        self.runs, self.started, self.size, self.run = 0, False, None, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x).mean((2, 3))


def update_average(m: Keeping, x: Tensor) -> Tensor:
    m.kept.lerp_(x.detach().mean((0, 2, 3)), 0.1)
    return m.convolution(x)


def copy_mean(m: Keeping, x: Tensor) -> Tensor:
    m.kept.copy_(x.detach().mean((0, 2, 3)))
    return m.convolution(x)


def put_in_place(m: Keeping, x: Tensor) -> Tensor:
    m.kept = 0.9 * m.kept + 0.1 * x.detach().mean((0, 2, 3))
    return m.convolution(x)


def add_half(m: Keeping, x: Tensor) -> Tensor:
    m.seen.add_(0.5)
    return m.convolution(x)


def set_weight_data(m: Keeping, x: Tensor) -> Tensor:
    m.convolution.weight.data = torch.renorm(m.convolution.weight.data, 2, 0, 0.1)
    return m.convolution(x)


def count_runs(m: Keeping, x: Tensor) -> Tensor:
    m.runs += 1
    return m.convolution(x) / m.runs


def count_runs_by_buffer(m: Keeping, x: Tensor) -> Tensor:
    return count_runs(m, x) if m.kept[0] == 0 else m.convolution(x)


def initialise_in_first_run(m: Keeping, x: Tensor) -> Tensor:
    if not m.started:
        m.started, x = True, 2 * x
    return m.convolution(x)


def read_statistics_afterwards(m: Keeping, x: Tensor) -> Tensor:
    return m.convolution(m.norm(x) - m.norm.running_mean.view(1, 3, 1, 1))


def normalise_twice(m: Keeping, x: Tensor) -> Tensor:
    x = m.norm(x)
    return m.convolution(functional.batch_norm(x, m.norm.running_mean, m.norm.running_var))


def read_counter(m: Keeping, x: Tensor) -> Tensor:
    m.seen += 1
    return m.convolution(x / m.seen)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("run", "text"),
    [
        (update_average, "changes the buffer kept"),
        (copy_mean, "changes the buffer kept"),
        (put_in_place, "puts another tensor in the place of kept"),
        (add_half, "changes the buffer seen"),
        (set_weight_data, r"puts another tensor in the place of convolution.weight while it runs \(by = or .data =\)"),
        (count_runs, "changes its attribute runs while it runs, from 1 to 2"),
        (initialise_in_first_run, "sets its attribute started from False to True in its first run.*Run it once before"),
        (count_runs_by_buffer, "changes its attribute runs while it runs, from 1 to 2"),
        (
            read_statistics_afterwards,
            "reads the buffer norm.running_mean, which aten.batch_norm.default in norm.*changed before",
        ),
        (normalise_twice, "reads the buffer norm.running_mean, which aten.batch_norm.default in norm.*changed before"),
        (read_counter, "add_"),
    ],
)
def test_what_a_trace_would_get_wrong_is_refused(run, text: str):
    """`set_weight_data` and `read_statistics_afterwards` once ran, and trained other weights than one process."""
    with pytest.raises(TraceError, match=f"(?s){text}"):
        TraceCache(Keeping(run), SHAPE, nn.CrossEntropyLoss()).get_graph(ONE)


def test_two_threads_that_try_a_model_restore_what_they_replace():
    """`torch.autograd.Function.apply` is replaced meanwhile: each would restore what the other one has set."""
    begun, ended = threading.Event(), threading.Event()
    plain = torch.autograd.Function.__dict__.get("apply")

    def run_first(m: Keeping, x: Tensor) -> Tensor:
        begun.wait(timeout=0.5)
        return m.convolution(x)

    def run_second(m: Keeping, x: Tensor) -> Tensor:
        begun.set()
        ended.wait(timeout=0.5)
        return m.convolution(x)

    def check(run) -> None:
        check_side_effects(Keeping(run), TensorSpec(SHAPE, "float32"))
        ended.set()

    threads = [threading.Thread(target=check, args=(run,)) for run in (run_first, run_second)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert torch.autograd.Function.__dict__.get("apply") is plain


# ---- what may be kept


def count_after_reading(m: Keeping, x: Tensor) -> Tensor:
    x = x * (m.seen + 1)
    m.seen += 1
    return m.convolution(x)


def read_statistics_before(m: Keeping, x: Tensor) -> Tensor:
    middle = m.norm.running_mean.view(1, 3, 1, 1) * 1
    return m.convolution(m.norm(x) - middle)


def store_size(m: Keeping, x: Tensor) -> Tensor:
    m.size = x.shape[-1]
    return m.convolution(x) / m.size


def record_profile(m: Keeping, x: Tensor) -> Tensor:
    with torch.profiler.record_function("convolution"):  # its handle is another object in each call
        return m.convolution(x)


def compute_losses(model: nn.Module, steps: int, images: Tensor, labels: Tensor) -> list[float]:
    optimiser, found = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimiser.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("run", [count_after_reading, read_statistics_before, store_size, record_profile])
def test_what_is_read_before_it_changes_is_that_of_one_process(run):
    model, images, labels = Keeping(run).double(), torch.randn(SHAPE).double(), torch.tensor([0, 1, 2, 3])
    with Cluster(1, backend="loopback") as cluster:
        training = Training(copy.deepcopy(model), ONE, cluster, SHAPE)
        found = [training.step(images, labels) for _ in range(3)]
        state = training.state_dict()
    assert found == pytest.approx(compute_losses(model, 3, images, labels), rel=1e-12, abs=0)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.parametrize("run", [count_after_reading, read_statistics_before])
def test_but_not_in_several_micro_batches(run):
    """In one process the second of them reads what the first has left."""
    with pytest.raises(PlanError, match="changes in each of the 2 micro-batches of a step"):
        TraceCache(Keeping(run), SHAPE, nn.CrossEntropyLoss()).get_graph(HALVES)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_compiled_model_is_looked_at_without_compiling_it():
    check_side_effects(make_traceable(torch.compile(Keeping(store_size))), TensorSpec(SHAPE, "float32"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would move the model to GPUs")
def test_a_model_for_several_gpus_is_the_module_in_it():
    """DataParallel opens a profiler's range around the module."""
    TraceCache(nn.DataParallel(Keeping(store_size)), SHAPE, functional.cross_entropy).get_graph(ONE)


# ---- modules that cannot be traced


def make_plain_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def make_unstarted_cluster() -> Cluster:
    """A cluster that is not started: whoever calls its ranks fails with another error."""
    return Cluster(1, backend="loopback")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.jit.script(make_plain_model()), "The model is a RecursiveScriptModule of torch.jit"),
        (
            lambda: torch.jit.trace(make_plain_model(), torch.zeros(SHAPE)),
            "The model is a TopLevelTracedModule of torch.jit",
        ),
        (
            lambda: nn.Sequential(torch.jit.script(make_plain_model()), nn.Linear(4, 2)),
            "The model.0 is a RecursiveScriptModule",
        ),
        (
            lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten()),
            "lazy modules whose weights have no shape yet: 0.weight, 0.bias, 1.weight, 1.bias,.*Run it once",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:Lazy modules:UserWarning")
def test_modules_without_a_plain_forward_are_refused(make, text: str):
    with pytest.raises(TraceError, match=text):
        Training(make(), ONE, make_unstarted_cluster(), SHAPE)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_so_is_a_scripted_loss():
    def compute_loss(prediction, labels):
        return functional.cross_entropy(prediction, labels)

    with pytest.raises(TraceError, match=r"The loss is a ScriptFunction of torch\.jit"):
        Training(make_plain_model(), ONE, make_unstarted_cluster(), SHAPE, loss=torch.jit.script(compute_loss))


def test_a_model_without_values_is_refused_before_ranks_are_asked():
    with pytest.raises(TraceError, match=r"0.weight of the model is on the meta device and has no values"):
        Training(make_plain_model().to("meta"), ONE, make_unstarted_cluster(), SHAPE)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_a_lazy_model_that_has_run_is_a_plain_one():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model(torch.zeros(SHAPE))
    assert TraceCache(model, SHAPE, nn.CrossEntropyLoss()).get_graph(ONE).weights.keys() == {
        "model.0.weight",
        "model.0.bias",
    }


def register_parameter_hook(model: nn.Module) -> object:
    return model[0].weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


def register_post_accumulate_hook(model: nn.Module) -> object:
    return model[0].weight.register_post_accumulate_grad_hook(lambda weight: None)


def register_backward_hook(model: nn.Module) -> object:
    return model[0].register_full_backward_hook(lambda module, before, after: None)


def register_backward_pre_hook(model: nn.Module) -> object:
    return model[0].register_full_backward_pre_hook(lambda module, after: None)


@pytest.mark.parametrize(
    "hook", [register_parameter_hook, register_post_accumulate_hook, register_backward_hook, register_backward_pre_hook]
)
def test_a_hook_of_a_gradient_is_refused_until_it_is_removed(hook):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    handle = hook(model)
    with pytest.raises(TraceError, match=r"0.* of the model has a hook of its gradient, which ranks would not call"):
        TraceCache(model, SHAPE, functional.cross_entropy)
    handle.remove()
    TraceCache(model, SHAPE, functional.cross_entropy)


def draw_by_numpy() -> float:
    return np.random.rand()  # noqa: NPY002 (as users write it)


class Chance(nn.Module):
    """Stochastic depth by a generator of Python's or NumPy's."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.first, self.second, self.draw = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1), draw

    def forward(self, x):
        x = self.first(x)
        return (self.second(x) if self.draw() < 0.5 else x).mean((2, 3))


def test_an_attribute_that_stays_nan_does_not_change():
    model = Keeping(lambda m, x: m.convolution(x))
    model.size = float("nan")
    check_side_effects(model, TensorSpec(SHAPE, "float32"))


@pytest.mark.parametrize(("draw", "name"), [(random.random, "Python's random"), (draw_by_numpy, "numpy.random")])
def test_chance_that_is_not_torchs_is_refused(draw, name):
    """A trace would have what was drawn once in every step."""
    random.seed(0)
    with pytest.raises(TraceError, match=f"draws random numbers by {name}"):
        TraceCache(Chance(draw), SHAPE, functional.cross_entropy).get_graph(ONE)
    random.seed(1)
    before = random.getstate()
    with pytest.raises(TraceError):
        TraceCache(Chance(draw), SHAPE, functional.cross_entropy).get_graph(ONE)
    assert random.getstate() == before


def test_chance_of_torch_is_not_taken_for_it():
    TraceCache(nn.Sequential(Chance(lambda: 0.0), nn.Dropout(0.5)), SHAPE, functional.cross_entropy).get_graph(ONE)
