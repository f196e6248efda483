"""Trace any `nn.Module`, with or without a loss, at full image size and without memory, into a `ModelGraph`.

`torch.export` exports the model on fake tensors. The model itself is never run and never changed.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph.constant_propagation import ConstantPropagationMode
from mpi4dl_nb.engines.graph.export_reader import ExportReader, make_tensor_spec
from mpi4dl_nb.engines.graph.exported_nodes import drop_broadcasts, inline_subgraphs, insert_casts, insert_detaches
from mpi4dl_nb.engines.graph.functionalise import functionalise, remove_dead_nodes
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, TensorSpec, find_updated_buffers, to_user_name
from mpi4dl_nb.engines.graph.outputs import (
    call_loss,
    collect_from_prediction,
    collect_tensors,
    find_left_out,
    get_prediction,
)
from mpi4dl_nb.engines.graph.outside_state import restore_outside_state
from mpi4dl_nb.engines.graph.outside_tensors import OwnedMemory, check_lifted_tensors
from mpi4dl_nb.engines.graph.owners import collect_buffers, find_first_names, iterate_owners
from mpi4dl_nb.engines.graph.recomputed_norms import find_recomputed_buffers
from mpi4dl_nb.engines.graph.stored_tensors import find_readable_modules, format_stored_error, refuse_stored_tensors
from mpi4dl_nb.engines.graph.traceability import collect_attributes, make_fake_copy, make_fake_tensor, make_traceable
from mpi4dl_nb.engines.graph.watch_forward import (
    ONE_AT_A_TIME,
    TraceAbortedError,
    quote_layer_names,
    silence_exporter,
    watch_forward,
)
from mpi4dl_nb.engines.graph.working_sizes import suggest_sizes
from mpi4dl_nb.engines.plan import HALF

_BY_VALUES = ("GuardOnDataDependent", "DataDependent", "UserError", "PendingUnbacked")
"""Prefixes of the names of PyTorch's errors for values that are unknown while it traces."""

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
"""The releases of PyTorch with which traced graphs were tested."""


@cache
def check_torch_release(release: str = str(torch.__version__)) -> None:
    """Warn, once, of a release that is newer than those that were tested. Raises TraceError for one that is older."""
    known = f"{'.'.join(map(str, OLDEST_TORCH))} to {'.'.join(map(str, NEWEST_TORCH))}"
    version = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if version < OLDEST_TORCH:
        raise TraceError(f"PyTorch {release} is too old: models are traced with {known}. pip install --upgrade torch.")
    if version > NEWEST_TORCH:
        warnings.warn(
            f"PyTorch {release} is newer than the releases that traced models were tested with ({known}): rely on it "
            "only after training.verify().",
            RuntimeWarning,
            stacklevel=4,
        )


@dataclass
class _LossInput:
    """The type of what the loss is given, and the places of the tensors in the model's output that it is not given.

    `readable` are the user's own modules, by path, which the loss may read. They are here and not in the traced module,
    whose parts the exporter would take them for.
    """

    readable: Mapping[str, Sequence[nn.Module]]
    type: str = "Tensor"
    left_out: tuple[str, ...] = ()


class _TracedModel(nn.Module):
    """A model with its loss, or alone and in evaluation mode: no dropout, batch norm with its running statistics."""

    def __init__(
        self,
        constants: ConstantPropagationMode,
        readable: Mapping[str, Sequence[nn.Module]],
        model: nn.Module,
        loss: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.loss, self.constants = model, loss, constants
        self.loss_input = _LossInput(readable)
        if loss is None:
            self.eval()

    def forward(self, images: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        with watch_forward(self, self.constants):
            before = collect_attributes(self.model)
            answer = self.model(images)
            after = {name: [*map(id, tensors)] for name, tensors in collect_attributes(self.model).items()}
            self.constants.stored[:] = [name for name, ids in after.items() if ids != [*map(id, before.get(name, ()))]]
            if self.loss is None or labels is None:
                return tuple(collect_tensors(get_prediction(answer)).values())
            loss, loss_input = self._compute_loss(self.loss, answer, images, labels)
            if not isinstance(loss, Tensor):
                cut = isinstance(loss, int | float | torch.SymInt | torch.SymFloat)
                kind = "Python number" if cut else type(loss).__name__
                raise TraceError(
                    f"The loss returns a {kind}, but must return one number as a tensor. "
                    + ("Leave out its .item() or float()." if cut else "Return that tensor alone.")
                )
            kind = "Tensor" if isinstance(loss_input, Tensor) else type(loss_input).__name__
            self.loss_input.type, self.loss_input.left_out = kind, find_left_out(answer, loss_input)
            return loss, *collect_from_prediction(loss_input).values()

    def _compute_loss(self, loss: Callable[..., Any], answer: Any, images: Tensor, labels: Tensor) -> tuple[Any, Any]:
        """Return the loss, and what it was given of the model's answer."""
        first = next(iter(collect_tensors(get_prediction(answer)).values()), None)
        try:
            with refuse_stored_tensors(self.constants.stored, self.loss_input.readable):
                return call_loss(loss, answer, labels)
        except TraceError:
            raise
        except Exception as error:
            if type(error).__name__.startswith(_BY_VALUES):
                raise
            if self.constants.stored:
                reason = f"the loss fails ({type(error).__name__}: {_get_first_line(error)})"
                raise TraceError(format_stored_error(self.constants.stored[0], reason)) from error
            if isinstance(error, TypeError | AttributeError | KeyError) and not isinstance(answer, Tensor):
                whole = collect_tensors(answer)
                takes, called = "does not take it", ", none of them called logits,"
                if isinstance(get_prediction(answer), Tensor):
                    takes, called = "takes neither all of it nor its prediction alone", ""
                raise TraceError(
                    f"The model answers with a {type(answer).__name__} of {len(whole)} tensors "
                    f"({', '.join(whole)}){called} and the loss {takes} ({type(error).__name__}: {error}). "
                    "Give a loss that does: a function of this answer and the labels."
                ) from error
            raise TraceError(_format_loss_error(self.model, images, first, labels, error)) from error


def trace(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    images: TensorSpec,
    labels: TensorSpec,
    precision: str = "",
    device: str = "cpu",
) -> ModelGraph:
    """Return the graph of `loss(model(images), labels)`, a scalar.

    `images` is (N, C, H, W), one micro-batch at whole-image size. The model is traced in the type of `images` and in
    its current mode (train or eval). If `precision` is a half precision, the graph has the casts that `torch.autocast`
    does on that type of `device`. Raises TraceError if `torch.export` cannot trace the model.
    """
    return _export((model, loss), (images, labels), precision, device)


def trace_inference(model: nn.Module, images: TensorSpec, precision: str = "", device: str = "cpu") -> ModelGraph:
    """Return the graph of `model.eval()(images)` for prediction, without a loss and without trainable weights.

    Otherwise like `trace`; the model itself keeps its mode.
    """
    return _export((model,), (images,), precision, device)


def _export(owners: Sequence[Any], specs: Sequence[TensorSpec], precision: str, device: str) -> ModelGraph:
    """Export a model, with its loss if there is one, and rewrite its graph."""
    check_torch_release()
    model = owners[0]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _translate_errors(model, specs[0]):
        memory = OwnedMemory.of(*owners)
        copies = [
            make_fake_copy(make_traceable(owner), mode, specs[0].dtype, memory.make_memo())
            if isinstance(owner, nn.Module)
            else owner
            for owner in owners
        ]
        readable = find_readable_modules(model, *owners[1:], *copies[1:]) if len(owners) > 1 else {}
        whole = _TracedModel(ConstantPropagationMode(collect_buffers(*owners), memory), readable, *copies)
    inputs = tuple(make_fake_tensor(mode, spec) for spec in specs)
    with _translate_errors(model, specs[0], whole.constants), restore_outside_state(*owners):
        exported = torch.export.export(whole, inputs, strict=False).module()
        names = find_first_names(*owners)
        # The order matters: writes within nested graphs are found only after inlining; casts are inserted once no
        # operator writes to its input, since a cast copy would be written instead; detaches then see the casts.
        plain = drop_broadcasts(functionalise(inline_subgraphs(exported), names))
        with torch.device(device):
            insert_casts(plain, getattr(torch, precision) if precision in HALF else None, device)
        plain = insert_detaches(remove_dead_nodes(plain))
        check_lifted_tensors(plain, names, memory)
        graph = ExportReader(plain, names, has_loss=whole.loss is not None).read_graph()
        # The graph must not hold as a constant what an earlier run of forward has stored on the model.
        held = {value.untyped_storage()._cdata for value in graph.constants.values()}
        for name, tensors in collect_attributes(model).items():
            if name in whole.constants.stored and any(tensor.untyped_storage()._cdata in held for tensor in tensors):
                raise TraceError(format_stored_error(name, "the loss (or forward) reads that of an earlier run"))
        # Forward may have taken decisions by the numbers of a buffer: not if these change from step to step.
        changing = {name for node in graph.nodes for name in find_updated_buffers(graph, node)}
        for name, line in whole.constants.decided.items():
            if name in changing:
                raise TraceError(
                    f"{line} asks for the numbers of the buffer {to_user_name(name)}, which are others in each step: "
                    "a traced model takes its decisions once. Compute with the buffer itself."
                )
    chains = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        or (isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward)
    ]
    modules = whole.model.named_modules(remove_duplicate=False)
    synced = {name for name, module in modules if isinstance(module, nn.SyncBatchNorm) and module.training}
    graph = replace(
        graph,
        chains=frozenset(chains),
        loss_input=whole.loss_input.type,
        left_out=whole.loss_input.left_out,
        default_type=str(torch.get_default_dtype()).removeprefix("torch."),
        synced=frozenset(synced),
    )
    if whole.loss is None or not whole.constants.recomputes:
        return graph

    def forward() -> Tensor:
        images, labels = inputs
        loss, _ = call_loss(copies[1], copies[0](images), labels)
        return loss

    with _translate_errors(model, specs[0], whole.constants):
        return replace(graph, recomputed=find_recomputed_buffers(graph, collect_buffers(*copies), forward))


def infer_output_spec(model: nn.Module, images: TensorSpec) -> TensorSpec:
    """Return the spec of the (first) tensor that the model returns for such images, without running it on real ones.

    Raises TraceError if the model cannot run, returns no tensor or replaces a buffer.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    constants = ConstantPropagationMode(collect_buffers(model))
    with _translate_errors(model, images, constants), restore_outside_state(model):
        twin = make_fake_copy(model, mode, images.dtype)
        held = dict(twin.named_buffers())
        pixels = make_fake_tensor(mode, images)
        with mode, torch.no_grad(), watch_forward(nn.ModuleDict({"model": twin}), constants):
            answers = collect_tensors(get_prediction(twin(pixels)))
    for name, buffer in twin.named_buffers():
        if buffer is not held.get(name):
            raise TraceError(f"The model replaces its buffer {name} while it runs. Keep such values outside.")
    if not answers:
        raise TraceError("The model answers with no tensor: there is nothing to train.")
    return make_tensor_spec(next(iter(answers.values())))


@contextmanager
def _translate_errors(
    model: nn.Module, images: TensorSpec, constants: ConstantPropagationMode | None = None
) -> Iterator[None]:
    """Convert errors to TraceErrors, and suppress PyTorch's messages about its own graphs."""
    try:
        # A compiled model is traced as written: its kernels would read memory that fake tensors do not have.
        # The graph has its own casts, by the plan's precision: those of a caller's `torch.autocast` would come twice.
        with (
            ONE_AT_A_TIME,
            silence_exporter(),
            quote_layer_names(),
            torch.compiler.set_stance("force_eager"),
            _without_autocast(),
        ):
            yield
    except TraceError:
        raise
    except Exception as error:
        cause = error.error if isinstance(error, TraceAbortedError) else error
        if isinstance(cause, TraceError):
            raise cause from None
        if constants is not None and constants.unanswered and type(cause).__name__.startswith(_BY_VALUES):
            raise constants.make_error() from cause
        raise TraceError(
            f"{type(model).__name__} cannot be traced with images of shape {images.shape}: "
            f"{type(cause).__name__}: {_get_first_line(cause)}. Check that it runs on images of this shape, the loss "
            "too, and that its forward takes no decision from the values of a tensor; tensors that either keeps must "
            f"be parameters or buffers.{suggest_sizes(model, images)}"
        ) from cause


@contextmanager
def _without_autocast() -> Iterator[None]:
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):  # only where it is on: "cuda" warns on a machine without
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _format_loss_error(model: nn.Module, images: Tensor, first: Tensor | None, labels: Tensor, error: Exception) -> str:
    """Return the message for a failing loss; most often the labels differ from those that it was traced with."""
    reason = f"{type(error).__name__}: {_get_first_line(error)}"
    answer = "" if first is None else f" The model answers with {tuple(first.shape)}, {first.dtype}."
    return (
        f"{type(model).__name__} cannot be traced with images of shape {tuple(images.shape)}: the loss fails with "
        f"labels of shape {tuple(labels.shape)}, {labels.dtype} ({reason}).{answer} Labels are taken "
        "for class numbers unless labels= says otherwise. If yours are others, give an example of those of "
        "a whole batch, such as labels=torch.zeros(4, 1, 32, 32); if they are these, let the loss reshape and convert "
        "them: loss=lambda p, y: loss(p, y[:, None].to(p.dtype))."
    )


def _get_first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


# The names of tensors in a module's own `state_dict()`, and their names on the ranks.


@dataclass(frozen=True)
class StateNames:
    """The names of a module's `state_dict()`, in its order.

    `held` maps a state name to the name on the ranks; several map to one tensor if weights are tied. `kept` are the
    tensors that the graph does not use, by state name: no rank changes them; their names on the ranks begin with
    `prefix`. As in PyTorch, buffers registered with `persistent=False` are not part of the state.
    """

    names: tuple[str, ...] = ()
    held: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    prefix: str = ""

    @property
    def on_ranks(self) -> dict[str, str]:
        """The name on the ranks of every tensor, those of `kept` too."""
        return {name: self.held.get(name, self.prefix + name) for name in self.names}


def collect_state_names(model: nn.Module, loss: object, used: Collection[str]) -> dict[str, StateNames]:
    """Return the names of the model and, if it is a module, of the loss; `used` are the names that graph nodes read."""
    first = find_first_names(model, loss)
    names = {}
    for prefix, module in iterate_owners(model, loss):
        named = [*module.named_parameters(), *module.named_buffers()]
        # By identity: a state_dict() lists a tied weight under each of its names, the ranks know only the first.
        ranks_say = {id(tensor): first[prefix + name] for name, tensor in named}
        state = {name: t for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
        held = {name: on_ranks for name, t in state.items() if (on_ranks := ranks_say.get(id(t), "")) in used}
        kept = {name: t.detach() for name, t in state.items() if name not in held}
        names[prefix.removesuffix(".")] = StateNames(tuple(state), held, kept, prefix)
    return names
