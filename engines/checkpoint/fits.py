"""Whether a checkpoint is one of this model, loss, optimiser and scheduler: asked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from engines.checkpoint.optimisers import kind_of
from engines.checkpoint.stored import STATE, Checkpoint, tensors_of
from engines.errors import CheckpointError
from engines.optimisers import make_optimiser
from engines.training import Recipe

__all__ = ["check_fits_recipe", "check_shapes"]

_SHOWN = 3

Shapes = Mapping[str, tuple[int, ...]]


def check_fits_recipe(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Read every byte of it, and hold it against what is to be trained. Raises CheckpointError."""
    checkpoint.check_files()
    graph = {**recipe.graph.weights, **recipe.graph.buffers}
    for owner, names in recipe.names.items():
        held = {name: tuple(graph[said].shape) for name, said in names.held.items()}
        kept = {name: tuple(tensor.shape) for name, tensor in names.kept.items()}
        if held or kept or owner == "model":
            check_shapes(checkpoint, owner, held | kept)
    trained = recipe.graph.trainable & recipe.graph.weights.keys()
    _check_trained(checkpoint, trained)
    _check_kinds(checkpoint, recipe, bool(trained))


def check_shapes(checkpoint: Checkpoint, owner: str, ours: Shapes) -> None:
    """Hold the tensors of the model, or of the loss, against ours. Raises CheckpointError where they are others."""
    file = tensors_of(owner)
    if not (checkpoint.path / file).exists():
        raise CheckpointError(f"{checkpoint.path}: it has no {file}. It is of a training whose {owner} had no weights.")
    theirs = {name: shape for name, (shape, _) in checkpoint.shapes(file).items()}
    missing, unknown = ours.keys() - theirs.keys(), theirs.keys() - ours.keys()
    other = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    if not (missing or unknown or other):
        return
    told = (
        _first("not in it", missing),
        _first("not here", unknown),
        _first("of another shape", other, lambda name: f"{name} {theirs[name]} instead of {ours[name]}"),
    )
    agree = len(ours) - len(missing) - len(other)
    raise CheckpointError(
        f"{checkpoint.path}: this checkpoint is of another {owner}: of its {len(theirs)} tensors {agree} are those of "
        f"the {len(ours)} here; {'; '.join(text for text in told if text)}. Load it into the {owner} that it was saved "
        "from."
    )


def _first(what: str, names: Collection[str], tell: Callable[[str], str] = str) -> str:
    shown = ", ".join(tell(name) for name in sorted(names)[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {shown}{more}" if names else ""


def _check_trained(checkpoint: Checkpoint, trained: Collection[str]) -> None:
    theirs, ours = checkpoint.weight_states.keys(), set(trained)
    for what, names in (("not trained there", ours - theirs), ("not trained here", theirs - ours)):
        if names:
            raise CheckpointError(
                f"{checkpoint.path}: this checkpoint trains {len(theirs)} weights, and this training {len(ours)}: "
                f"{_first(what, names)}. Give all weights the requires_grad that they had, or load the weights "
                "alone: safetensors.torch.load_file."
            )
    with checkpoint.reading():
        needed = {f"{name}/{key}" for name, state in checkpoint.weight_states.items() for key in state.tensors}
    if missing := needed - checkpoint.shapes(STATE).keys():
        raise CheckpointError(f"{checkpoint.path}: this checkpoint is damaged: {_first('not in it', missing)}.")


def _check_kinds(checkpoint: Checkpoint, recipe: Recipe, trains: bool) -> None:
    """The kinds of optimiser and scheduler."""
    given = {spec.name: spec.stand_in() for spec in recipe.parameters}
    optimiser = make_optimiser(recipe.optimiser, given) if trains else None
    paced = recipe.scheduler(optimiser) if recipe.scheduler and optimiser else None
    for what, made in (("optimiser", optimiser), ("scheduler", paced)):
        with checkpoint.reading():
            stored = checkpoint.manifest[what]
            theirs = stored["kind"] if stored else "none"
        ours = kind_of(made) if made else "none"
        if theirs != ours:
            raise CheckpointError(
                f"{checkpoint.path}: the {what} of this checkpoint is {theirs}, and here it is {ours}. Train with the "
                "one that it was saved from; to begin another one, load the weights alone: safetensors.torch.load_file."
            )
