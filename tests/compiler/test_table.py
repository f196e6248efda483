"""The operator table as a whole: no entry without a test.

`python -m tests.compiler.test_table` prints how many operators it has, and how many random cases hold each.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import mpi4dl_nb.engines.compiler.entries  # noqa: F401  (fills the operator table)
from mpi4dl_nb.engines.compiler.operator_table import get_rules, is_user_defined

# Whoever adds an entry adds a test, and the entry's name here, under the file that has the test.
HELD = {
    "test_operators": """
        conv2d.default conv2d.padding conv_transpose2d.input max_pool2d.default avg_pool2d.default
        adaptive_avg_pool2d.default pad.default constant_pad_nd.default slice.Tensor cat.default chunk.default
        split.Tensor split_with_sizes.default unbind.int permute.default mean.default mean.dim sum.default
        sum.dim_IntList cross_entropy_loss.default mse_loss.default l1_loss.default
        binary_cross_entropy_with_logits.default batch_norm.default add_.Tensor prelu.default""",
    "test_assignment": """
        slice_scatter.default select_scatter.default index_put.default scatter.value scatter.src scatter_add.default
        index_fill.int_Scalar zeros.default ones.default full.default""",
    "test_sampling": """
        upsample_nearest2d.vec _upsample_nearest_exact2d.vec upsample_bilinear2d.vec upsample_bicubic2d.vec
        _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec pixel_shuffle.default pixel_unshuffle.default""",
    "test_norms": """
        instance_norm.default group_norm.default layer_norm.default rms_norm.default var.default var.dim
        var.correction std.default var_mean.default std_mean.default std.dim std.correction var_mean.dim
        var_mean.correction std_mean.dim std_mean.correction""",
    "test_extremes": """
        amax.default amin.default max.default min.default adaptive_max_pool2d.default linalg_vector_norm.default
        logsumexp.default max_pool2d_with_indices.default max_unpool2d.default""",
    "test_whole": """
        grid_sampler.default rot90.default median.default prod.default argsort.default argsort.stable
        kthvalue.default any.default all.default count_nonzero.default cummax.default cummin.default sort.stable
        msort.default tril.default triu.default""",
    "test_losses": """
        nll_loss_nd.default smooth_l1_loss.default huber_loss.default soft_margin_loss.default kl_div.default
        poisson_nll_loss.default binary_cross_entropy.default loss.counted.default""",
    "test_random": """
        dropout.default feature_dropout.default alpha_dropout.default feature_alpha_dropout.default rand.default
        rand_like.default randn.default randn_like.default randint.default randint.low bernoulli.default bernoulli.p
        uniform.default normal_functional.default exponential.default rrelu.default""",
    "test_channels": """
        view.default view_as.default reshape.default reshape_as.default flatten.using_ints unflatten.int
        squeeze.default squeeze.dim squeeze.dims unsqueeze.default expand.default expand_as.default
        broadcast_to.default repeat.default tile.default new_empty.default new_zeros.default new_ones.default
        new_full.default transpose.int swapaxes.default swapdims.default movedim.int movedim.intlist moveaxis.int
        mT.default t.default numpy_T.default
        stack.default concat.default channel_shuffle.default one_hot.default cumsum.default cumprod.default
        flip.default roll.default glu.default sort.default topk.default index_select.default index.Tensor
        repeat_interleave.self_int narrow.default max.dim min.dim argmax.default argmin.default median.dim
        prod.dim_int any.dim all.dim select.int gather.default cosine_similarity.default
        type_as.default to.other""",
    "test_volumes": """
        conv1d.default conv1d.padding conv3d.default conv3d.padding conv_transpose1d.default conv_transpose3d.input
        max_pool1d.default max_pool3d.default max_pool1d_with_indices.default max_pool3d_with_indices.default
        avg_pool1d.default avg_pool3d.default adaptive_avg_pool1d.default adaptive_avg_pool3d.default
        adaptive_max_pool1d.default adaptive_max_pool3d.default max_unpool3d.default upsample_nearest1d.vec
        upsample_nearest3d.vec _upsample_nearest_exact1d.vec _upsample_nearest_exact3d.vec upsample_linear1d.vec
        upsample_trilinear3d.vec""",
    "test_patches": "im2col.default col2im.default unfold.default",
    "test_tokens": """
        softmax.int log_softmax.int linear.default matmul.default bmm.default einsum.default
        scaled_dot_product_attention.default""",
}


def test_every_entry_of_the_table_is_held():
    held = {name for names in HELD.values() for name in names.split()}
    table = {name.removeprefix("aten.") for name, (rule, *_) in get_rules().items() if not is_user_defined(rule)}
    assert table - {"getitem"} == held


def test_the_files_that_hold_them_are_there():
    assert all((Path(__file__).parent / f"{name}.py").exists() for name in HELD)


def count_drawn_cases(module: ModuleType) -> Iterator[int]:
    """For each of a file's tests that draw: how many cases, for each of its parameters."""
    for name, test in vars(module).items():
        if name.startswith("test_") and hasattr(test, "hypothesis"):
            marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
            yield math.prod(len(mark.args[1]) for mark in marks) * test._hypothesis_internal_use_settings.max_examples


def make_summary() -> dict[str, object]:
    """Entries of the table, and random cases, in all and by the file that holds the entries."""
    held = {name: names.split() for name, names in HELD.items()}
    cases = {name: sum(count_drawn_cases(importlib.import_module(f"tests.compiler.{name}"))) for name in HELD}
    return {
        "operators": sum(map(len, held.values())),
        "random_cases": sum(cases.values()),
        "files": {name: {"operators": len(names), "random_cases": cases[name]} for name, names in held.items()},
    }


def test_the_summary_counts_them():
    told = make_summary()
    assert (
        told["operators"] == len([rule for rule, *_ in get_rules().values() if not is_user_defined(rule)]) - 1
    )  # but for getitem
    assert all(found["random_cases"] > 0 for found in told["files"].values())


if __name__ == "__main__":
    print(json.dumps(make_summary()))
