"""The command lines that `tests/fuzz/commands.py` changes, and what it puts into them."""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_MODEL = "--model torch.nn:Conv2d --model-args [3,4,3] --image-size 16 --split-size 1"
_ONE = f"{_MODEL} --spatial-size 0"
_TRAIN = f"train {_ONE} --batch-size 1 --num-epochs 1"
_PREDICT = "predict --model torch.nn:Conv2d --model-args [3,4,3]"
LINES: tuple[tuple[int, str], ...] = (
    (1, f"verify {_ONE}"),
    (2, f"verify {_MODEL} --slice-method 1x2 --batch-size 2 --parts 2 --seed 3 --learning-rate 0.01"),
    (1, f"bench step {_ONE} --iterations 1 --optimiser adam --clip-norm 1"),
    (2, f"bench memory {_MODEL} --num-spatial-parts 2 --slice-method vertical --checkpoint-activations"),
    (2, f"bench overlap {_ONE} --data-parallel 2 --link-mbit-per-s 4"),
    (1, f"bench compiled {_ONE} --iterations 1"),
    (2, f"bench throughput {_ONE} --warmup 1 --num-iters 1 --num-batches-per-iter 1"),
    (2, "bench bubble --split-size 2 --parts 2 --stage-seconds 0.1"),
    (4, "bench halo --image-size 16 --halo-len 1 --num-spatial-parts 4 --slice-method square --iterations 1"),
    (2, "bench allreduce --max-bytes 65536 --iterations 5"),
    (1, "bench overhead --iterations 1"),
    (1, f"bench streaming {_MODEL} --slice-method 4x1 --memory-mb 100 --iterations 1"),
    (1, f"bench largest {_ONE} --way again --memory-mb 100 --step-px 16"),
    (2, "bench read a.png --slice-method 1x2 --halo-px 3 --level 0"),
    (4, f"bench asynchronous {_ONE} --replicas 3 --steps 3 --mode all --slow 2:0.3"),
    (1, f"{_TRAIN} --app synthetic --max-steps 1 --num-classes 4 --log log.csv --save runs --held-out 0.5"),
    (1, f"{_TRAIN} --app medical --datapath classes --validate-path classes --augment flip --num-workers 1"),
    (1, f"{_TRAIN} --app 1 --datapath t.csv --within . --mask-threshold 127 --mask-ignore 255 --num-classes 2"),
    (1, f"{_TRAIN} --app 1 --datapath t.csv --within . --fit crop --num-classes 4"),
    (1, f"{_TRAIN} --app cifar --datapath classes --num-workers 1"),
    (1, f"{_PREDICT} --activation softmax --image a.png --region 0,0,16,16 --to b.tif"),
    (1, "table masks pictures masks made.csv"),
    (1, "published --only hy-fi"),
    (1, "gpu-check --only exact --timeout 5"),
    (0, "-n 2 verify --model resnet"),
)
"""Ranks, and the words behind `python -m mpi4dl_nb.engines`; for 0 ranks those behind `python -m mpi4dl_nb`."""

_LONG = ("99999999999999999999", "-99999999999999999999", "9" * 5000)
WHOLE = (*_split("-1 0 1 2 3 4 7 255 4096 1000000 2147483648 1000000000000"), *_LONG)
PARTS = _split("1e9 1.5 0.5 0.0 -0.1 1e-320 1e308 1e400 nan -inf")
SEVERAL = _split("4,2 1,1 4, , -1,-1,0,0 0,0,8,8 0,0,1000000000000,8 31,31,99999999999999999999,1 2:nan 0:-1 1:1e400")
SIZES = (*_split("2x2 1x1 4x1 0x0 2x2, 3x 17x5 1000000x1000000 99999999999x1"), "1x" + "9" * 5000)
ODD = (
    *_split("[ %s%n {0} $(id) ' \\ é\udcff 0x10 1_000 +3 ² ٣ - -- auto square vertical 2x2 cuda cuda:99 meta cpu"),
    *_split("float16 bfloat16 float64 1f1b gems interleaved zero_bubble all server peers flip,stain crop cifar"),
    *_split("medical scores null sgd adagrad"), "", " ", "a" * 10_000,
)  # fmt: skip
_JSON = (
    *_split('[] {} null [NaN] [1e999] {"":{}} {":":[]} {"os:getcwd":[]} [3,4000000,99] {"in_channels":3} [3,4,0]'),
    *_split('[{"torch:zeros":[1000000,1000000]}] [3,4,33] [-3,4,3] [1,4,3] [3,4,3,1000000] [3,4,[3,3,3]] ["3",4,3]'),
    *_split('[3,4,3,1,1,1,1,true,"reflect"] [3,4,1,1,99999999999999999999] [3,99999999999999999999,1]'), "[" * 50_000,
)  # fmt: skip
_MODELS = _split(
    "mpi4dl_nb.engines.models : a: :b ..:x mpi4dl_nb.engines.models:resnet21 mpi4dl_nb: os:getcwd sys:exit "
    "builtins:print torch:ones json:loads unet no.such:thing torch.nn:Module torch.nn:Identity "
    "torch.nn:Conv3d torch.nn:ConvTranspose2d torch.nn:Linear "
    "torch.nn:LazyConv2d torch.nn:Transformer torch.nn:Sequential"
)
_IN = _split("a.png classes pipe nothing empty noise loop /dev/zero /dev/null noise/x t.csv .")
_OUT = (*_split("classes pipe no/such/folder noise noise/x.csv loop pipe.csv x.jsonl noise.json"), "")
KINDS: dict[str, tuple[str, ...]] = {
    "--model": _MODELS,
    "--model-args": _JSON,
    "--batch-size": (*_split("-1 0 1 2 7 1000000000000"), *_LONG),
    **dict.fromkeys(("--image", "--weights", "--datapath", "--validate-path", "--resume", "--within"), _IN),
    **dict.fromkeys(("--to", "--log", "--save", "--folder"), _OUT),
    **dict.fromkeys(("--image-size", "--slice-method"), SIZES),
    **dict.fromkeys(("--region", "--balance", "--slow", "--num-spatial-parts"), SEVERAL),
    **dict.fromkeys(("--learning-rate", "--clip-norm", "--held-out", "--stage-seconds"), (*PARTS, *WHOLE)),
}
"""What flags are given, most of the time; the others are given numbers."""
