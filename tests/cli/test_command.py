"""The command line: its flags in this process, its commands as a shell starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from subprocess import CompletedProcess

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb.engines import models
from mpi4dl_nb.engines.cli import command, options
from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.graph.outputs import get_prediction
from mpi4dl_nb.engines.models import UNet, resnet20_v1
from mpi4dl_nb.engines.plan import Plan

# ---- flags


def parse_flags(*flags: str):
    return options.make_parser("Test.").parse_args(flags)


@pytest.mark.nightly
def test_a_rank_that_is_alone_leaves_no_shared_memory(tmp_path):
    words = [sys.executable, "-m", "mpi4dl_nb.engines", "bench", "overhead", "--iterations", "1"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PMI_"))}
    more = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path), "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    done = subprocess.run(words, env=alone | more, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_flags_the_plan_is_the_plans_own_default():
    assert options.make_plan(parse_flags()) == Plan()


@pytest.mark.parametrize("name", [field.name for field in fields(Plan)])
def test_every_knob_is_a_flag_under_its_own_name(name: str):
    (action,) = [a for a in options.make_parser("Test.")._actions if a.dest == name]
    assert f"--{name.replace('_', '-')}" in action.option_strings


FLAGS: dict[str, dict[str, object]] = {
    "--split-size 3 --spatial-size 2": {"split_size": 3, "spatial_size": 2},
    "--num-spatial-parts 9": {"num_spatial_parts": 9},
    "--split-size 3 --spatial-size 2 --num-spatial-parts 4,1": {
        "split_size": 3, "spatial_size": 2, "num_spatial_parts": (4, 1),
    },
    "--slice-method 2x3": {"slice_method": "2x3"},
    "--split-size 3 --spatial-size 2 --slice-method 2x3,vertical": {
        "split_size": 3, "spatial_size": 2, "slice_method": ("2x3", "vertical"),
    },
    "--spatial-size 0": {"spatial_size": 0},
    "--balance 20,18": {"balance": (20, 18)},
    "--balance auto": {"balance": "auto"},
    "--precision float64": {"precision": "float64"},
    "--dtype float64": {"precision": "float64"},
    "--precision bfloat16": {"precision": "bfloat16"},
    "--no-sync-batchnorm": {"sync_batchnorm": False},
    "--schedule fill_drain --parts 1 --times 1": {},
    "--schedule 1f1b --parts 4": {"schedule": "1f1b", "parts": 4},
    "--bidirectional --times 2": {"bidirectional": True, "times": 2},
    "--schedule interleaved --stages-per-rank 2 --split-size 3": {
        "schedule": "interleaved", "stages_per_rank": 2, "split_size": 3,
    },
    "--local-DP 2 --data-parallel 3": {"local_dp": 2, "data_parallel": 3},
    "--accumulate 2 --checkpoint-activations": {"accumulate": 2, "checkpoint_activations": True},
    "--attention-keys ring": {"attention_keys": "ring"},
    "--overlap-halos --compile-segments": {"overlap_halos": True, "compile_segments": True},
    "--local-DP 1 --local-dp 1 --data-parallel 1": {},
    "--sync-batchnorm": {},
}  # fmt: skip


@pytest.mark.parametrize(("flags", "knobs"), FLAGS.items(), ids=FLAGS)
def test_flags_make_a_plan(flags: str, knobs: dict[str, object]):
    assert options.make_plan(parse_flags(*flags.split())) == Plan(**knobs)


REFUSED = {
    "--parts 0": "parts=0 must be a whole number",
    "--times 2": "times=2 counts pairs of batches through both directions, but bidirectional is off",
    "--local-dp 2 --spatial-size 2": "local_dp=2 shares stages behind the spatial ones",
    "--data-parallel two": "data_parallel='two' must be a whole number",
    "--fused-layers 2": "fused_layers=2 counts the layers between two exchanges of halo_d2, which is off",
    "--halo-D2 --fused-layers many": "fused_layers='many' must be a whole number",
    "--schedule gems": "schedule='gems' is an order of two directions",
    "--schedule 2f2b": "schedule='2f2b' is unknown",
    "--balance 20": "balance=20 must be 'auto' or a tuple",
    "--balance 20,many": r"balance=\(20, 'many'\) must be 'auto' or a tuple",
    "--split-size two": "split_size='two' must be a whole number",
    "--split-size -1": "split_size=-1 must be a whole number",
    "--num-spatial-parts 4,2": "has 2 entries but spatial_size=1",
    "--slice-method diagonal": "slice_method='diagonal' is unknown",
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.items(), ids=REFUSED)
def test_plans_that_cannot_be_run(flags: str, message: str):
    with pytest.raises(PlanError, match=message):
        options.make_plan(parse_flags(*flags.split()))


WRONG_FLAGS = {
    "--tiles 4": "Unrecognized arguments: --tiles 4. See --help.",
    "--batch-size many": "Argument --batch-size: invalid int value: 'many'. See --help.",
    "--clip-norm much": "Argument --clip-norm: invalid float value: 'much'. See --help.",
    "--optimiser lion": "Argument --optimiser: invalid choice: 'lion'",
    "--seed": "Argument --seed: expected one argument. See --help.",
}


@pytest.mark.parametrize(("flags", "message"), WRONG_FLAGS.items(), ids=WRONG_FLAGS)
def test_wrong_flags_are_an_error_of_ours(flags: str, message: str, capsys):
    """Raised, not printed: every rank parses, and one of them speaks."""
    with pytest.raises(PlanError) as caught:
        parse_flags(*flags.split())
    assert str(caught.value).startswith(message)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "size"), [("512", (512, 512)), ("512x768", (512, 768)), ("100X132", (100, 132)), ("1", (1, 1))]
)
def test_image_sizes(text: str, size: tuple[int, int]):
    assert options.parse_image_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "512x", "x512", "0", "0x4", "-512", "5.5", "big", "512 px", "2x2x2x2"])
def test_what_is_no_image_size(text: str):
    with pytest.raises(PlanError, match="must be one number of pixels, HEIGHTxWIDTH such as 512x768, or of volumes"):
        options.parse_image_size(text)


def test_the_size_of_a_volume_is_for_commands_that_take_one():
    chosen = options.make_parser("").parse_args(["--image-size=8x16x24", "--batch-size=2"])
    assert options.get_image_shape(chosen) == (2, 3, 8, 16, 24)
    with pytest.raises(PlanError, match="8x16x24' is that of a volume, which this command does not take"):
        options.parse_image_size(chosen.image_size)


# ---- known bugs: whoever mends one strikes its mark


def test_a_digit_that_is_no_number():
    with pytest.raises(PlanError, match="must be one number of pixels"):
        options.parse_image_size("5²")


def test_the_balance_of_one_stage():
    assert options.make_plan(parse_flags("--split-size", "1", "--balance", "39,")) == Plan(split_size=1, balance=(39,))


# ---- models and optimisers


MODEL, UNET = "--model", "mpi4dl_nb:UNet"


def test_a_model_is_built_from_its_name_and_arguments():
    model = options.build_model(parse_flags(MODEL, UNET, "--model-args", '{"width": 4}', "--num-classes", "3"))
    assert isinstance(model, UNet)
    assert model.head.weight.shape == (3, 4, 1, 1)


def test_what_the_model_itself_is_given_counts_more():
    arguments = '{"width": 4, "num_classes": 5}'
    assert options.build_model(parse_flags(MODEL, UNET, "--model-args", arguments)).head.out_channels == 5


@pytest.mark.parametrize("arguments", ["[20]", "20"])
def test_arguments_may_be_a_list_or_one_value(arguments: str):
    model = options.build_model(parse_flags(MODEL, "mpi4dl_nb:resnet_v1", "--model-args", arguments))
    assert model.state_dict().keys() == resnet20_v1().state_dict().keys()


CALLS = {
    '{"torch.nn:ReLU": {}}': nn.ReLU,
    '[{"torch.nn:Sequential": [{"torch.nn:Conv2d": [3, 4, 1]}, {"torch.nn:ReLU": {"inplace": true}}]}]': nn.Sequential,
}


@pytest.mark.parametrize(("arguments", "kind"), CALLS.items(), ids=CALLS)
def test_arguments_may_be_calls_themselves(arguments: str, kind: type[nn.Module]):
    """As of models that take a configuration."""
    assert isinstance(
        options.build_model(parse_flags(MODEL, "torch.nn:Sequential", "--model-args", arguments))[0], kind
    )


NAMES = {
    "resnet": ("resnet_v2", {"depth": 110}),
    "resnet --num-layers 20": ("resnet_v2", {"depth": 20}),
    "resnet --num-layers 8": ("resnet_v1", {"depth": 8}),
    "resnet_v1 --num-layers 20": ("resnet_v1", {"depth": 20}),
    "resnet20_v1": ("resnet20_v1", {}),
    "amoebanet --num-layers 3 --num-filters 16": ("amoebanetd", {"num_layers": 3, "num_filters": 16}),
    "amoebanetd --num-layers 3 --num-filters 16": ("amoebanetd", {"num_layers": 3, "num_filters": 16}),
    "mpi4dl_nb:resnet_v2 --num-layers 11": ("resnet_v2", {"depth": 11}),
    "unet": ("UNet", {}),
    "unet --num-layers 3": ("UNet", {"depth": 3}),
}


@pytest.mark.parametrize(("flags", "expected"), NAMES.items(), ids=NAMES)
def test_models_have_short_names(flags: str, expected: tuple[str, dict[str, int]]):
    name, arguments = expected
    model = options.build_model(parse_flags(MODEL, *flags.split(), "--num-classes", "3"))
    same = attrgetter(name)(models)(**arguments, num_classes=3)
    shapes = [{key: value.shape for key, value in each.state_dict().items()} for each in (model, same)]
    assert shapes[0] == shapes[1]


STOCK = {"monai": "monai.networks.nets:resnet50", "transformers": "transformers:ResNetForImageClassification"}


@pytest.mark.nightly
@pytest.mark.parametrize("package", STOCK)
def test_a_stock_resnet50_is_of_the_package_that_is_there(package: str, monkeypatch):
    pytest.importorskip(package)
    monkeypatch.setattr("mpi4dl_nb.engines.cli.options.find_spec", lambda name: name == package)
    model = options.build_model(parse_flags(MODEL, "resnet50", "--num-classes", "7"))
    assert type(model).__module__.startswith(package)
    assert 23_400_000 < sum(p.numel() for p in model.parameters()) < 23_600_000
    with torch.no_grad():
        answer = model.eval()(torch.zeros(1, 3, 32, 32))
    assert get_prediction(answer).shape == (1, 7)


def test_where_no_package_has_a_resnet50(monkeypatch):
    monkeypatch.setattr("mpi4dl_nb.engines.cli.options.find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"neither MONAI nor transformers is installed: pip install 'monai"):
        options.build_model(parse_flags(MODEL, "resnet50"))


@pytest.mark.parametrize("depth", ["0", "2", "9", "19", "-7"])
def test_there_is_no_resnet_of_that_depth(depth: str):
    with pytest.raises(PlanError, match=f"--num-layers {depth}: a resnet has 9n"):
        options.build_model(parse_flags(MODEL, "resnet", "--num-layers", depth))


@pytest.mark.parametrize("flags", ["--num-layers 4", "--num-layers 0", "--num-filters 7", "--num-layers -3"])
def test_there_is_no_such_amoebanet(flags: str):
    with pytest.raises(PlanError, match="an amoebanet has three equal groups"):
        options.build_model(parse_flags(MODEL, "amoebanet", *flags.split()))


@pytest.mark.parametrize(
    "flags", ["unet --num-filters 8", "torch.nn:ReLU --num-layers 3", "resnet20_v1 --num-layers 8"]
)
def test_sizes_that_a_model_does_not_take_are_refused(flags: str):
    with pytest.raises(PlanError, match=r"--num-\w+ \d has no effect: \S+ takes no "):
        options.build_model(parse_flags(MODEL, *flags.split()))


def test_a_model_that_takes_no_classes_is_given_none():
    built = options.build_model(parse_flags(MODEL, "torch.nn:ReLU"))
    assert isinstance(built, nn.ReLU)


def test_weights_follow_from_the_seed():
    first, again, other = (
        options.build_model(parse_flags(MODEL, UNET, "--seed", seed)).head.weight for seed in ("1", "1", "2")
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


BAD_MODELS = {
    ("no.such.package:net",): (TraceError, "'no.such.package:net' cannot be imported .*Name it PACKAGE.MODULE:"),
    ("mpi4dl_nb.engines.models:resnet21",): (TraceError, "'mpi4dl_nb.engines.models:resnet21' cannot be imported"),
    ("mpi4dl_nb.engines.models",): (TraceError, "cannot be imported"),
    (":resnet20_v1",): (TraceError, "cannot be imported"),
    (UNET, "--model-args", "{width: 4}"): (PlanError, "'{width: 4}' is not JSON"),
    (UNET, "--model-args", '{"depht": 4}'): (TraceError, "UNet failed with TypeError: .*depht.*Check --model-args"),
    (UNET, "--model-args", "[4]"): (TraceError, "UNet failed with TypeError: .*positional.*Check --model-args"),
    (UNET, "--model-args", '{"width": {"mpi4dl_nb.engines.plan:Plen": {}}}'): (
        TraceError,
        "'mpi4dl_nb.engines.plan:Plen' cannot be imported",
    ),
    (UNET, "--model-args", '{"width": {"mpi4dl_nb.engines.plan:Plan": {"x": 0}}}'): (
        TraceError,
        "mpi4dl_nb.engines.plan:Plan failed with TypeE",
    ),
    ("mpi4dl_nb.engines.plan:Plan",): (TraceError, "mpi4dl_nb.engines.plan:Plan returned Plan, not a torch.nn.Module"),
}


@pytest.mark.parametrize(("model", "expected"), BAD_MODELS.items(), ids=map(" ".join, BAD_MODELS))
def test_models_that_cannot_be_built(model: tuple[str, ...], expected: tuple[type[Exception], str]):
    kind, message = expected
    with pytest.raises(kind, match=message):
        options.build_model(parse_flags(MODEL, *model))


@pytest.mark.parametrize(("name", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam)])
def test_optimisers(name: str, kind: type[torch.optim.Optimizer]):
    make = options.choose_optimiser(parse_flags("--optimiser", name, "--learning-rate", "0.25"))
    optimiser = make([nn.Parameter(torch.zeros(2))])
    assert type(optimiser) is kind
    assert optimiser.defaults["lr"] == 0.25


def test_a_recipe_is_checked_against_the_ranks():
    flags = parse_flags(MODEL, UNET, "--image-size", "12x20", "--batch-size", "2", "--dtype", "float64")
    with pytest.raises(PlanError, match="needs 5 ranks"):
        options.make_recipe(flags, ranks=4)
    model, recipe = options.make_recipe(flags, ranks=5)
    assert recipe.graph.inputs["images"].shape == (2, 3, 12, 20)
    assert recipe.graph.inputs["images"].dtype == "float64"
    assert {f"model.{name}" for name, _ in model.named_parameters()} == set(recipe.graph.weights)


class Mixup(nn.Sequential):
    """Mixes each image with another one of its batch."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, num_classes, 3))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward((images + images.flip(0)) / 2).mean((2, 3))


class WithAuxiliary(Mixup):
    def forward(self, images: Tensor) -> dict[str, Tensor]:
        logits = super().forward(images)
        return {"logits": logits, "auxiliary": logits * 2}


WARNED = {
    "mixing": ("Mixup", ("--parts", 2), "computes with several images at once"),
    "left out": ("WithAuxiliary", (), "it is given the logits"),
}


@pytest.mark.parametrize(("model", "flags", "text"), WARNED.values(), ids=WARNED)
def test_a_command_warns_as_a_notebook_does(model: str, flags: tuple[object, ...], text: str):
    plan = ("--split-size", 1, "--spatial-size", 0, "--batch-size", 4, *flags)
    with pytest.warns(UserWarning, match=text):
        options.make_recipe(parse_flags(MODEL, f"tests.cli.test_command:{model}", *map(str, plan)), ranks=1)


@pytest.mark.nightly
def test_ranks_warn_once(mpiexec):
    sizes = ("--split-size", 2, "--spatial-size", 0, "--batch-size", 4, "--parts", 2, "--max-steps", 1)
    flags = "--model", "tests.cli.test_command:Mixup", "--held-out", "0.2", *map(str, sizes)
    done = mpiexec(2, "-m", "mpi4dl_nb.engines", "train", *flags)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("computes with several images at once, as far") == 1  # in training
    assert done.stderr.count("computes with several images at once in evaluation mode") == 1


# ---- commands


Shell = Callable[..., CompletedProcess[str]]

MODELS = """
import os
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.wide, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, num_classes, 1)

    def forward(self, x):
        return self.head(self.wide(x).relu())

class Spectrum(Tiny):
    def forward(self, x):
        return super().forward(torch.fft.fft2(x).real)

class Another(Tiny):
    "Its weights differ a little from rank to rank."
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.wide.weight.data *= 1 + 1e-6 * int(os.environ["OMPI_COMM_WORLD_RANK"])
"""
TWO = ("--split-size", 1, "--slice-method", "1x2", "--image-size", 16)


@pytest.fixture
def engines(mpiexec, tmp_path, monkeypatch) -> Shell:
    """`engines(ranks, *arguments)` runs the command line in a folder that has the models above in `mine.py`."""
    (tmp_path / "mine.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return lambda ranks, *arguments: mpiexec(ranks, "-m", "mpi4dl_nb.engines", *arguments)


@pytest.mark.nightly
def test_verify_says_ok_in_one_line(engines: Shell):
    done = engines(5, "verify", "--model", "mpi4dl_nb:resnet20_v1", "--image-size", 32, "--batch-size", 2)
    assert done.returncode == 0, done.stderr
    (text,) = done.stdout.splitlines()
    line = json.loads(text)
    assert set(line) == {
        "ok", "ranks", "loss_rel", "grad_rel", "worst_parameter", "worst_parameter_rel", "buffers_rel",
        "params_rel", "dtype", "seconds",
    }  # fmt: skip
    assert line["ok"] is True
    assert line["ranks"] == 5
    assert line["dtype"] == "float64"
    assert line["worst_parameter"] in dict(resnet20_v1().named_parameters())
    assert max(line[name] for name in ("loss_rel", "grad_rel", "buffers_rel", "params_rel")) < 1e-10
    assert line["seconds"] > 0


@pytest.mark.nightly
def test_verify_that_ran_and_is_wrong(engines: Shell):
    """The ranks do not hold the same model: a difference of a millionth is told."""
    done = engines(2, "verify", "--model", "mine:Another", *TWO)
    assert done.returncode == 1, done.stderr
    (text,) = done.stdout.splitlines()
    line = json.loads(text)
    assert line["ok"] is False
    assert 1e-10 < line["grad_rel"] < 1e-4


@pytest.mark.nightly
def test_bench_step_is_one_line(engines: Shell):
    done = engines(2, "bench", "step", "--model", "mine:Tiny", "--batch-size", 2, "--iterations", 1, *TWO)
    assert done.returncode == 0, done.stderr
    (text,) = done.stdout.splitlines()
    line = json.loads(text)
    assert set(line) == {
        "images_per_s", "one_process_images_per_s", "ratio", "of_limit", "spread", "threads", "phases",
    }  # fmt: skip
    assert line["ratio"] == pytest.approx(line["images_per_s"] / line["one_process_images_per_s"], abs=1e-3)
    assert line["images_per_s"] > 0
    assert line["spread"] == 0  # of one step
    assert line["threads"] >= 1


NOT_AS_ASKED = {
    "ranks": (5, ("--slice-method", "1x5", "--image-size", 16), "PlanError: The plan needs 6 ranks (5 + 1 over 2 "),
    "flag": (2, (*TWO, "--tiles", 4), "PlanError: Unrecognized arguments: --tiles 4"),
    "knob": (2, (*TWO, "--parts", 4), "PlanError: A batch of 1 images cannot be cut into parts=4 micro-batches"),
    "import": (2, (*TWO, "--model", "mine:Huge"), "TraceError: 'mine:Huge' cannot be imported"),
    "arguments": (
        2,
        (*TWO, "--model", "mine:Tiny", "--model-args", '{"wide": 4}'),
        "TraceError: mine:Tiny failed with",
    ),
    "operator": (2, (*TWO, "--image-size", 130, "--model", "mine:Spectrum"), "TraceError: aten.fft_fft2.default "),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "flags", "message"), NOT_AS_ASKED.values(), ids=NOT_AS_ASKED)
def test_what_cannot_be_run_is_said_in_one_line(engines: Shell, ranks: int, flags: tuple[object, ...], message: str):
    """Of all ranks one speaks, and no MPI noise around it."""
    done = engines(ranks, "verify", *flags)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(message)


def build_on_some_ranks(num_classes: int) -> nn.Module:
    """A model that one host cannot make, as where a file of weights is missing."""
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        raise FileNotFoundError("weights.pt")
    return models.resnet20_v1(num_classes=num_classes)


class OfFourImages(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, num_classes, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).mean((2, 3)).view(4, -1)


FAILING = {
    "verify --model tests.cli.test_command:build_on_some_ranks": "weights.pt",
    "train --model tests.cli.test_command:OfFourImages --held-out 0.2 --max-steps 2": "images of shape (1, 3, 32, 32)",
}


@pytest.mark.nightly
@pytest.mark.parametrize(("command", "said"), FAILING.items(), ids=["verify", "train"])
def test_an_error_of_one_rank_ends_all(mpiexec, command: str, said: str):
    sizes = ("--split-size", 2, "--spatial-size", 0, "--batch-size", 4, "--image-size", 32)
    done = mpiexec(2, "-m", "mpi4dl_nb.engines", *command.split(), *map(str, sizes))
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert said in line


def test_a_command_that_needs_no_ranks_runs_once(monkeypatch, tmp_path):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert command.main(["table", "masks", *map(str, [tmp_path / "none", tmp_path / "none", tmp_path / "t.csv"])]) == 0
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert command.main(["table", "masks", *map(str, [tmp_path / "none", tmp_path / "none", tmp_path / "t.csv"])]) == 2
