"""Random plans: a model, a size and every knob, as the flags of the command that repeats it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hypothesis import strategies as st

from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan import Plan

GRIDS = ("1x1", "1x2", "2x1", "2x2", "1x3", "3x1"), ("1x1x1", "1x1x2", "2x1x1", "1x2x2", "2x2x1", "1x3x1")
SIZES = ("16x16", "19x22", "24x16"), ("8x10x12", "9x8x13")
MODELS = {"Skips": 2, "Segmenter": 2, "Chain": 2, "Tokens": 2, "Volume": 3}  # axes of their images


def format_command(flags: list[str], ranks: int) -> str:
    """What a person types to see the same."""
    return f"mpiexec --with-ft ulfm -n {ranks} python -m mpi4py -m mpi4dl_nb.engines verify {shlex.join(flags)}"


def make_plan(flags: list[str]) -> Plan:
    """The plan that these flags ask for. Raises PlanError."""
    return options.make_plan(options.make_parser("").parse_args(flags))


@st.composite
def draw_flags(draw: st.DrawFn, most_ranks: int) -> list[str]:
    """Flags of a plan for at most that many ranks, valid by construction."""
    flags = _draw_model(draw)
    flags += _draw_stages(draw, _get_grids(flags))
    flags += _draw_order(draw, flags)
    flags += draw(st.sampled_from([[], ["--halo-d2", "--fused-layers", "2"], ["--halo-d2", "--fused-layers", "auto"]]))
    flags += ["--overlap-halos"] if draw(st.booleans()) else []
    flags += ["--checkpoint-activations"] if draw(st.booleans()) else []
    flags += ["--attention-keys", draw(st.sampled_from(["auto", "gather", "ring"]))]
    flags += ["--offload-activations"] if draw(st.integers(0, 3)) == 0 else []
    flags += ["--data-parallel", str(draw(st.sampled_from([1, 1, 2])))]
    flags += ["--seed", str(draw(st.integers(0, 3))), "--dtype", "float64", "--num-classes", "5"]
    while make_plan(flags).ranks > most_ranks:
        flags = _reduce_ranks(flags)
    return flags


def _draw_model(draw: st.DrawFn) -> list[str]:
    model = draw(st.sampled_from(list(MODELS)))
    return ["--model", f"tests.zoo:{model}", "--image-size", draw(st.sampled_from(SIZES[MODELS[model] - 2]))]


def _get_grids(flags: list[str]) -> Sequence[str]:
    """The grids for the model of the flags, from few tiles to many."""
    return GRIDS[_get_flag(flags, "--image-size").count("x") - 1]


def _draw_stages(draw: st.DrawFn, choices: Sequence[str]) -> list[str]:
    """Stages and tiles; U-shaped models have four layers."""
    stages = draw(st.integers(1, 4))
    spatial = draw(st.integers(0, min(2, stages)))
    grids = [draw(st.sampled_from(choices)) for _ in range(spatial)]
    flags = ["--split-size", str(stages), "--spatial-size", str(spatial)]
    return [*flags, "--slice-method", ",".join([*grids, ""])] if grids else flags


def _draw_order(draw: st.DrawFn, flags: list[str]) -> list[str]:
    """Micro-batches, directions, and who shares them."""
    behind = int(_get_flag(flags, "--split-size")) - int(_get_flag(flags, "--spatial-size"))
    parts, both = draw(st.sampled_from([1, 2, 3])), draw(st.booleans())
    shares = draw(st.sampled_from([1, 2])) if behind else 1
    schedules = ["fill_drain", "1f1b", "zero_bubble"]
    schedules += ["gems"] if both else []
    schedules += ["interleaved"] if behind in (2, 4) else []
    schedule = draw(st.sampled_from(schedules))
    found = ["--schedule", schedule, "--parts", str(parts), "--local-dp", str(shares)]
    found += ["--batch-size", str(parts * shares * draw(st.sampled_from([1, 2])))]
    found += ["--stages-per-rank", "2"] if schedule == "interleaved" else []
    found += ["--bidirectional", "--times", str(draw(st.sampled_from([1, 2])))] if both else []
    return [*found, "--accumulate", str(draw(st.sampled_from([1, 1, 2])))]


def _get_flag(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


def _reduce_ranks(flags: list[str]) -> list[str]:
    """The same with fewer ranks: no replicas, then no shares, then narrower grids."""
    found, choices = list(flags), _get_grids(flags)
    for name in ("--data-parallel", "--local-dp"):
        if _get_flag(found, name) != "1":
            found[found.index(name) + 1] = "1"
            return found
    grids = _get_flag(found, "--slice-method").split(",")
    widest = max(range(len(grids)), key=lambda index: choices.index(grids[index]) if grids[index] else -1)
    grids[widest] = choices[choices.index(grids[widest]) - 1]
    found[found.index("--slice-method") + 1] = ",".join(grids)
    return found


def is_valid(flags: list[str]) -> bool:
    """Whether the flags make a plan at all."""
    try:
        make_plan(flags)
    except PlanError:
        return False
    return True
