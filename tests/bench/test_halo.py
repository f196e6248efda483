"""The halo benchmark: what it calls valid, what it refuses, and the line that it prints."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mpi4dl_nb.engines.bench import halo
from mpi4dl_nb.engines.bench.halo import (
    HaloCase,
    is_valid_exchange,
    make_halo_case,
    make_halo_parser,
    make_halo_runner,
    make_pattern,
    run_forward,
)
from mpi4dl_nb.engines.cli import command
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.program.exchange_runner import ExchangeRunner


def make_case(*flags: object) -> HaloCase:
    return make_halo_case(make_halo_parser().parse_args([*map(str, flags), "--device", "cpu"]))


def check_exchange(wanted: HaloCase) -> list[bool]:
    def work(world: LoopbackWorld) -> bool:
        return is_valid_exchange(world, make_halo_runner(wanted, world)[0])

    return run_ranks(wanted.plan.ranks, work)


UNEVEN = ("--image-size", "37x50", "--in-channels", 3, "--batch-size", 2, "--out-channels", 2)
SLICES = {
    "square": ("--slice-method", "square"),
    "vertical": ("--slice-method", "vertical"),
    "horizontal": ("--slice-method", "horizontal"),
    "2x3": ("--slice-method", "2x3"),
    "wider than a neighbour": ("--slice-method", "vertical", "--halo-len", 20),
    "float64": ("--slice-method", "3x1", "--dtype", "float64"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("slices", SLICES.values(), ids=SLICES)
def test_uneven_tiles_are_valid(slices: tuple[object, ...]):
    wanted = make_case(*UNEVEN, *slices)
    assert check_exchange(wanted) == [True] * wanted.plan.ranks


def drop_borrowed_gradients(carrier: ExchangeRunner, grad: Tensor, source: Tensor) -> None:
    source.grad = grad[..., *carrier.exchange.own.to_slices(carrier.exchange.window)].clone()


def test_gradients_that_never_come_home_are_not_valid(monkeypatch):
    """What the predecessor does: the gradients of borrowed pixels are dropped."""
    monkeypatch.setattr(halo, "run_backward", drop_borrowed_gradients)
    assert check_exchange(make_case(*UNEVEN)) == [False] * 4


@pytest.mark.parametrize("place", [(0, 0, 0, 0), (1, 2, -1, -1), (0, 1, 5, 5)], ids=["corner", "last", "inside"])
def test_one_wrong_pixel_is_not_valid(place: tuple[int, ...], monkeypatch):
    def run_forward_wrongly(carrier: ExchangeRunner, source: Tensor | None) -> Tensor | None:
        window = run_forward(carrier, source)
        window[place] += carrier.world.rank == 2
        return window

    monkeypatch.setattr(halo, "run_forward", run_forward_wrongly)
    assert check_exchange(make_case(*UNEVEN)) == [False] * 4


def test_a_pattern_is_the_same_wherever_it_is_cut():
    runner, _ = make_halo_runner(
        make_case(*UNEVEN),
        SimpleNamespace(rank=3, size=4, prepare=lambda sends, receives: None, can_access=lambda device: True),
    )
    exchange, cpu = runner.exchange, torch.device("cpu")
    window, inside = make_pattern(exchange, exchange.window, cpu), make_pattern(exchange, exchange.own, cpu)
    assert torch.equal(window[..., *exchange.own.to_slices(exchange.window)], inside)
    assert inside.abs().max() <= 510
    assert len(inside.unique()) > 500


REFUSED = {
    ("--image-size", "8x9", "--halo-len", 9): "A halo of 9 pixels is wider than the image of 8x9. Use --halo-len 8 or",
    ("--image-size", "3x64", "--slice-method", "horizontal"): "3 rows of pixels cannot be cut into 4 tiles",
    ("--num-spatial-parts", 9): "The plan needs 9 ranks .*, but there are 4",
    ("--num-spatial-parts", 6): "The plan needs 6 ranks .*, but there are 4",
    ("--slice-method", "diagonal"): "slice_method='diagonal' is unknown",
    ("--dtype", "float16"): "Argument --dtype/--precision: invalid choice: 'float16'",
    ("--halo-len", 0): "Argument --halo-len: '0' must be a whole number of at least 1.",
    ("--iterations", "many"): "Argument --iterations: 'many' must be a whole number of at least 1.",
    ("--image-size", "big"): "--image-size 'big' must be",
    ("--split-size", 2): "Unrecognized arguments: --split-size 2",
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.items(), ids=[" ".join(map(str, flags)) for flags in REFUSED])
def test_what_cannot_be_exchanged(flags: tuple[object, ...], message: str):
    with pytest.raises(PlanError, match=message):
        make_halo_runner(make_case(*flags), SimpleNamespace(rank=0, size=4))


def test_one_tile_has_no_halo():
    with pytest.raises(PlanError, match="One tile has no neighbour to borrow from"):
        make_halo_runner(make_case("--num-spatial-parts", 1), SimpleNamespace(rank=0, size=1))


@pytest.mark.parametrize(("line", "right"), [({"valid": False}, False), ({"valid": True}, True), ({}, True)])
def test_the_exit_code_follows_the_verdict(line: dict[str, object], right: bool, monkeypatch, capsys):
    monkeypatch.setattr(halo, "bench_halo", lambda *arguments: line)
    assert command._run_command("bench halo", SimpleNamespace(rank=0), ["--validate"]) is right
    assert json.loads(capsys.readouterr().out) == line


# ---- as a shell starts it


@pytest.mark.nightly
def test_the_line(mpiexec):
    flags = (*UNEVEN, "--slice-method", "2x2", "--warmup", 1, "--iterations", 3, "--with-compute", "--validate")
    done = mpiexec(4, "-m", "mpi4dl_nb.engines", "bench", "halo", *flags)
    assert done.returncode == 0, done.stderr
    (text,) = done.stdout.splitlines()
    line = json.loads(text)
    assert set(line) == {
        "valid", "ranks", "tiles", "image_shape", "halo_px", "dtype", "bytes", "messages", "ratio",
        "ratio_messages_only", "forward", "backward",
    }  # fmt: skip
    assert line["valid"] is True
    assert (line["ranks"], line["tiles"], line["image_shape"], line["halo_px"]) == (4, "2x2", [2, 3, 37, 50], 3)
    assert line["messages"] == [3, 3, 3, 3]
    # rows 0-18 | 18-37, columns 0-25 | 25-50: a strip to each side and a corner, of 2 x 3 values of 4 bytes
    assert line["bytes"] == [2 * 3 * 4 * 3 * (rows + 25 + 3) for rows in (18, 18, 19, 19)]
    measured = {"ms", "by_hand_ms", "messages_ms", "convolution_ms"}
    ratios = {"spread", "ratio", "ratio_messages_only"}
    assert set(line["forward"]) == measured | ratios | {"copied_ms", "ratio_copied"}
    assert set(line["backward"]) == measured | ratios
    for way in ("forward", "backward"):
        assert all(len(line[way][name]) == 4 and min(line[way][name]) > 0 for name in measured)
        ours, theirs = sum(line[way]["ms"]), sum(line[way]["by_hand_ms"])
        assert line[way]["ratio"] == pytest.approx(ours / theirs, rel=1e-2)


@pytest.mark.nightly
def test_what_cannot_be_run_is_said_in_one_line(mpiexec):
    done = mpiexec(2, "-m", "mpi4dl_nb.engines", "bench", "halo", "--num-spatial-parts", 4)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("PlanError: The plan needs 4 ranks (4 over 1 stages), but there are 2.")
