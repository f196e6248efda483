"""`help()` is enough: every public name has a docstring with an example that stands alone, and runs."""

from __future__ import annotations

import doctest
import inspect
import warnings

import pytest
from matplotlib import pyplot as plt

import mpi4dl_nb


@pytest.mark.parametrize("name", mpi4dl_nb.__all__)
def test_the_example_of_a_public_name_runs(name: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    text = inspect.getdoc(getattr(mpi4dl_nb, name)) or ""
    test = doctest.DocTestParser().get_doctest(text, {name: getattr(mpi4dl_nb, name)}, name, None, None)
    assert test.examples, f"{name} has no example"
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)
    plt.close("all")


def test_all_names_are_sorted_and_there():
    assert sorted(mpi4dl_nb.__all__) == mpi4dl_nb.__all__
    assert all(hasattr(mpi4dl_nb, name) for name in mpi4dl_nb.__all__)
