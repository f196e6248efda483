"""Ranks run the code that the notebook has: its modules, from its paths, whatever becomes of their files meanwhile."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from mpi4dl_nb import Cluster
from mpi4dl_nb.cluster.module_constants import parse_constants
from mpi4dl_nb.cluster.user_modules import UserModules
from mpi4dl_nb.engines.comm.start import make_command
from mpi4dl_nb.engines.errors import PlanError, RankError
from mpi4dl_nb.engines.server.notebook_imports import pack
from mpi4dl_nb.launch.reaper_process import MARK

N = 2


@pytest.fixture(scope="module")
def cluster():
    with Cluster(N) as made:
        yield made


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """In the notebook's path, after the ranks have started; modules in it are forgotten in the end."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(folder: Path, name: str, text: str) -> None:
    """A file that is newer than the one before, by seconds, as compiled files know it."""
    file = folder / f"{name}.py"
    last_s = file.stat().st_mtime if file.exists() else time.time()
    file.write_text(textwrap.dedent(text))
    os.utime(file, (last_s + 2, last_s + 2))
    importlib.invalidate_caches()


def load_module(folder: Path, name: str, text: str):
    write(folder, name, text)
    return importlib.import_module(name)


def test_a_path_that_came_after_the_start_is_known(cluster, folder, capsys):
    late = load_module(folder, "late_a", "def rate(host): return 0.1")
    assert cluster.call(late.rate) == [0.1] * N
    assert capsys.readouterr().err == ""


def test_a_reload_reaches_the_ranks_and_is_said_once(cluster, folder, capsys):
    edited = load_module(folder, "edited_a", "def rate(host): return 0.1\ndef other(host): return rate(host)")
    assert cluster.call(edited.rate) == [0.1] * N
    write(folder, "edited_a", "def rate(host): return 100.0\ndef other(host): return rate(host)")
    importlib.reload(edited)
    assert cluster.call(edited.rate) == [100.0] * N
    assert cluster.call(edited.other) == [100.0] * N
    assert capsys.readouterr().err.count("The module edited_a") == 1


def test_what_a_cells_function_imports_is_loaded_again(cluster, folder):
    def read_rate(host):
        import edited_b

        return edited_b.RATE

    edited = load_module(folder, "edited_b", "RATE = 0.1")
    assert cluster.call(read_rate) == [0.1] * N
    write(folder, "edited_b", "RATE = 100.0")
    importlib.reload(edited)
    assert cluster.call(read_rate) == [100.0] * N
    write(folder, "edited_b", "RATE = 200.0")
    importlib.reload(edited)
    assert cluster.call(read_rate) == [200.0] * N


def test_a_file_that_was_changed_and_not_loaded_again_changes_nothing(cluster, folder):
    """As in the notebook itself. A rank that had never imported it would import the new file."""
    edited = load_module(folder, "edited_c", "def rate(host): return 0.1")
    write(folder, "edited_c", "def rate(host): return 100.0")
    assert edited.rate(None) == 0.1
    assert cluster.call(edited.rate) == [0.1] * N

    def read_through_import(host):
        import edited_c

        return edited_c.rate(host)

    with pytest.raises(RankError, match=r"the file of edited_c has changed since the notebook imported it; reload it"):
        cluster.call(read_through_import)
    importlib.reload(edited)
    assert cluster.call(read_through_import) == [100.0] * N


def test_a_constant_that_the_notebook_has_set_is_the_ranks(cluster, folder):
    mine = load_module(folder, "constants_m", "FACTOR = 1.0\nNAMES = ['a']\ndef rate(host): return FACTOR, NAMES")
    assert cluster.call(mine.rate) == [(1.0, ["a"])] * N
    mine.FACTOR = 2.0
    mine.NAMES.append("b")
    assert cluster.call(mine.rate) == [(2.0, ["a", "b"])] * N


@pytest.mark.parametrize("name", ["H", "W", "HALF", "PAIR", "LAST"])
def test_a_constant_of_any_assignment_that_the_notebook_has_set_is_the_ranks(cluster, folder, name):
    names = "H, W, HALF, PAIR, LAST"
    text = f"H, (W, _) = 64, (32, 0)\nHALF = PAIR = H // 2\nLAST: int = -W\ndef sides(host): return {names}"
    mine = load_module(folder, f"sides_{name}", text)
    before = (64, 32, 32, 32, -32)
    assert cluster.call(mine.sides) == [before] * N
    setattr(mine, name, 1000)
    assert cluster.call(mine.sides) == [tuple(vars(mine)[each] for each in ("H", "W", "HALF", "PAIR", "LAST"))] * N


CONSTANTS = """
PLUS, MEGABYTE, OFF = +1, 1 << 20, ~0
SIZES = (64, 32)
H, W = SIZES
A, (B, *C) = 1, (2, 3)
D, E, F = *(4, 5), 6
TABLE = [0] * 4
NAN = 1e999 - 1e999
SCALES = {"a": 2 * W, "b": {1, -1}}
SIGNS = [-1, 0, +1]
LEVEL = 1
if LEVEL:
    LEVEL = 2
DEEPER = LEVEL + 1
SOME, OTHER = 5, len(SIZES)
DECLARED: int
WRONG = 1 / 0 if False else 3
"""


def test_which_constants_of_a_file_are_followed(folder):
    file = folder / "constants_all.py"
    file.write_text(CONSTANTS)
    found = {"PLUS": 1, "MEGABYTE": 1 << 20, "OFF": -1, "SIZES": (64, 32), "H": 64, "W": 32, "A": 1}
    found |= {"SCALES": {"a": 64, "b": {1, -1}}, "SIGNS": [-1, 0, 1], "SOME": 5}
    assert parse_constants(str(file)) == found


def test_a_constant_that_cannot_be_compared_is_another(cluster, folder):
    mine = load_module(folder, "arrays_n", "KEPT = [0, 0]\ndef kept(host): return len(KEPT)")
    mine.KEPT[0] = torch.ones(3)
    assert cluster.call(mine.kept) == [2] * N


def test_a_module_that_uses_one_that_was_loaded_again_follows(cluster, folder):
    inner = load_module(folder, "inner_d", "def rate(): return 0.1")
    outer = load_module(folder, "outer_d", "import inner_d\ndef rate(host): return inner_d.rate()")
    assert cluster.call(outer.rate) == [0.1] * N
    write(folder, "inner_d", "def rate(): return 100.0")
    importlib.reload(inner)
    assert cluster.call(outer.rate) == [100.0] * N


def test_instances_of_a_class_that_was_loaded_again_follow(cluster, folder):
    text = """
        class Half:
            def __init__(self, rate):
                self.rate = rate
            def __call__(self, host):
                return {} * self.rate
    """
    made = load_module(folder, "classes_e", text.format(1))
    assert cluster.call(made.Half(0.5)) == [0.5] * N
    write(folder, "classes_e", text.format(10))
    importlib.reload(made)
    assert cluster.call(made.Half(0.5)) == [5.0] * N


def test_a_module_called_like_one_of_pythons_is_the_notebooks(cluster, folder):
    """`antigravity` is nobody's import; a rank would import Python's own."""
    mine = load_module(folder, "antigravity", "def rate(host): return 0.1")
    assert mine.__file__.startswith(str(folder))
    assert cluster.call(mine.rate) == [0.1] * N


def test_a_module_that_cannot_follow_is_named(cluster, folder):
    text = "import threading\nlock = threading.Lock()\ndef rate(host):\n    with lock: return {}"
    edited = load_module(folder, "locked_f", text.format(0.1))
    assert cluster.call(edited.rate) == [0.1] * N
    write(folder, "locked_f", text.format(100.0))
    importlib.reload(edited)
    with pytest.raises(PlanError, match=r"in locked_f \(a file has changed since.*cannot pickle.*cluster.restart"):
        cluster.call(edited.rate)


def test_a_module_that_ranks_cannot_load_again_is_named_to_a_call_that_needs_it(cluster, folder):
    def read_rate(host):
        import broken_l

        return broken_l.RATE

    broken = load_module(folder, "broken_l", "RATE = 0.1")
    assert cluster.call(read_rate) == [0.1] * N
    write(folder, "broken_l", f"import os\nRATE = 100.0\nif {MARK!r} in os.environ: raise OSError('no card')")
    importlib.reload(broken)
    assert cluster.call(lambda host: host.world.all_gather(1)) == [[1, 1]] * N
    with pytest.raises(RankError, match="the notebook has reloaded broken_l, but ranks cannot: OSError: no card"):
        cluster.call(read_rate)
    write(folder, "broken_l", "RATE = 300.0")
    importlib.reload(broken)
    assert cluster.call(read_rate) == [300.0] * N


def test_a_module_that_ranks_do_not_find_is_named(cluster, folder):
    gone = load_module(folder, "gone_g", "def rate(host): return 0.1")
    path = sys.path.pop(0)
    try:
        with pytest.raises(PlanError, match="ranks cannot import gone_g, which they need for what they were sent"):
            cluster.call(gone.rate)
    finally:
        sys.path.insert(0, path)


@pytest.mark.nightly
def test_without_compiled_files_what_may_have_changed_is_sent_as_it_is(folder, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    mine = load_module(folder, "plain_k", "def rate(host): return 0.1")
    modules = UserModules()
    assert b"co_" not in modules.pack([len])[0]
    assert len(modules.pack([mine.rate])[0]) > 300  # its name alone takes less than a hundred bytes
    importlib.reload(mine)
    assert len(modules.pack([mine.rate])[0]) < 100
    assert list(modules.follow.reloaded) == ["plain_k"]


AUTORELOAD = """
import importlib, os, sys, time
from pathlib import Path
from IPython.testing.globalipapp import start_ipython
shell = start_ipython()
folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
def write(rate):
    file = folder / "auto_h.py"
    file.write_text(f"def rate(host):\\n    return {rate}\\n")
    os.utime(file, (1_000_000 + rate, 1_000_000 + rate))
write(1)
shell.run_cell("%load_ext autoreload\\n%autoreload 2")
shell.run_cell("from auto_h import rate\\nfrom mpi4dl_nb.cluster.user_modules import UserModules")
shell.run_cell("modules = UserModules()")
shell.run_cell("import pickle, auto_h\\nbefore = modules.pack([rate])[0]")
by_name = len(shell.user_ns["before"])
write(200)
shell.run_cell("after = modules.pack([rate])[0]\\nnow = rate(None)\\nfollow = modules.follow")
assert shell.user_ns["now"] == 200
assert len(shell.user_ns["after"]) > 3 * by_name, "sent by value"
assert list(shell.user_ns["follow"].reloaded) == ["auto_h"], shell.user_ns["follow"]
assert not shell.user_ns["follow"].changed
print("followed")
"""


@pytest.mark.nightly
def test_autoreload_is_followed(tmp_path):
    """It changes functions where they are, and the module is not loaded again."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "IPYTHONDIR": str(tmp_path / "ipython")}
    done = subprocess.run(
        [sys.executable, "-c", AUTORELOAD, str(tmp_path)],
        capture_output=True, text=True, check=False, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["followed"], done.stdout + done.stderr


@pytest.mark.nightly
def test_ranks_that_start_later_import_the_file_as_it_is(folder):
    edited = load_module(folder, "edited_i", "def rate(host): return 0.1")
    earlier = UserModules()
    first = earlier.pack([edited.rate])[0]
    write(folder, "edited_i", "def rate(host): return 100.0")
    importlib.reload(edited)
    later = UserModules()
    assert len(later.pack([edited.rate])[0]) == len(first)  # by its name
    assert len(earlier.pack([edited.rate])[0]) > 3 * len(first)


def test_a_module_that_has_two_names_is_sent_once(folder, monkeypatch):
    edited = load_module(folder, "edited_k", "def rate(host): return 0.1")
    monkeypatch.setitem(sys.modules, "edited_by_another_name", edited)
    names = ["edited_k", "edited_by_another_name"]
    assert len(pack(edited.rate, names)) > 3 * len(pack(edited.rate))


@pytest.mark.nightly
def test_what_is_as_it_was_is_not_read_again(folder, monkeypatch):
    load_module(folder, "edited_j", "def rate(host): return 0.1")
    modules = UserModules()
    modules.pack([None])
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda path: pytest.fail(f"{path} is read"))
    for _ in range(3):
        modules.pack([None])
        assert modules.follow


START = """
import sys
from mpi4dl_nb import Cluster
from mpi4dl_nb.launch.reaper_process import MARK
from mpi4dl_nb.cluster.module_constants import parse_constants
with Cluster(2) as cluster:
    def draws(host):
        import random
        import mine
        return random.Random(0).random(), mine.RATE, host.world.all_gather(1)
    print(cluster.call(draws))
"""


@pytest.mark.nightly
def test_ranks_start_beside_files_called_like_pythons_modules(tmp_path):
    """As a notebook's kernel does, the script has imported Python's own before it looks into its folder."""
    for name in ("random", "queue", "signal", "json", "socket", "asyncio", "struct", "tempfile", "logging"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('this file of the user has been imported')")
    (tmp_path / "mine.py").write_text("RATE = 0.1")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    lines = "from mpi4dl_nb import Cluster; import sys; sys.path.insert(0, '')\n" + START
    done = subprocess.run(
        [sys.executable, "-P", "-c", lines], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert "0.8444218515250481, 0.1, [1, 1]" in done.stdout, done.stdout + done.stderr


def hide_packages(folder: Path) -> None:
    """Files of the user's, called as packages that ranks need."""
    for name in ("engines/__init__", "mpi4dl_nb", "zmq", "ipyparallel", "mpi4py", "torch", "numpy", "random"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text("raise RuntimeError('this file of the user has been imported')")


@pytest.mark.nightly
def test_ranks_start_beside_files_called_like_our_packages(tmp_path):
    """A folder of the user's was found in place of ours: "The Python of the ranks has no engines.comm"."""
    hide_packages(tmp_path)
    (tmp_path / "mine.py").write_text("RATE = 0.1")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    lines = "from mpi4dl_nb import Cluster; import sys; sys.path.insert(0, '')\n" + START
    done = subprocess.run(
        [sys.executable, "-P", "-c", lines], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert "0.8444218515250481, 0.1, [1, 1]" in done.stdout, done.stdout + done.stderr


def test_a_rank_finds_the_packages_that_it_needs(tmp_path):
    hide_packages(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in (
        make_command("mpi4dl_nb.engines.comm.supervisor", sys.executable, "-P", "-c", "print('started')"),
        make_command("mpi4dl_nb.engines.comm.supervisor", *make_command("ipyparallel.engine", "--version")),
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
        assert not done.returncode, done.stderr
        assert done.stdout


@pytest.mark.parametrize("name", ["engines/__init__.py", "engines.py"])
def test_a_package_engines_of_the_users_changes_nothing(name: str, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("POWER_KW = 40")
    for first, second in (("mpi4dl_nb", "engines"), ("engines", "mpi4dl_nb")):
        code = f"import {first}, {second}; print(engines.POWER_KW, mpi4dl_nb.Plan(split_size=1).ranks)"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stdout.split() == ["40", "4"], done.stderr


@pytest.mark.nightly
def test_a_command_on_ranks_starts_beside_them_too(tmp_path):
    (tmp_path / "random.py").write_text("raise RuntimeError('this file of the user has been imported')")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mpi4dl_nb", "-n", "1", "--help"],
        capture_output=True, text=True, check=False, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert not done.returncode, done.stderr


@pytest.mark.nightly
def test_an_import_that_was_interrupted_is_done_anew_in_the_next_call(tmp_path, monkeypatch):
    """As matplotlib, whose submodules refer to it: Python keeps these, but not the package, if it is interrupted."""
    package = tmp_path / "half_imported"
    package.mkdir()
    (package / "part.py").write_text("import half_imported\n\ndef answer():\n    return half_imported.ANSWER\n")
    (package / "__init__.py").write_text(
        "import pathlib\n"
        "from half_imported import part\n"
        f"note = pathlib.Path({str(tmp_path / 'note')!r})\n"
        "if not note.exists():\n"
        "    note.touch()\n"
        "    raise KeyboardInterrupt\n"
        "ANSWER = 42\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def read_half_imported(host):
        import half_imported

        return half_imported.part.answer()

    with Cluster(1, backend="loopback") as cluster:
        with pytest.raises(RankError, match="KeyboardInterrupt"):
            cluster.call(read_half_imported)
        assert cluster.call(read_half_imported) == [42]
