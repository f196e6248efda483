"""Whatever dies, nothing of a cluster is left ten seconds later: no process, no folder, no shared memory.

Notebooks are processes of their own here, one of them a Jupyter kernel; their clusters start side by side.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from jupyter_client import KernelManager

from mpi4dl_nb.cluster.mpi_ranks import MpiRanks
from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.launch import reaper_process, run_directory
from mpi4dl_nb.launch.reaper_process import MARK, Reaper
from mpi4dl_nb.launch.run_directory import PidFile, remove_stale_clusters
from tests.start_failures import CASES

ROOT = Path(__file__).parents[2]
GONE_S = 10.0
NOTEBOOK = """if True:
    import json, os, sys
    from mpi4dl_nb.cluster.cluster import Cluster
    cluster = Cluster(2).start()
    ranks = cluster._ranks
    controller, mpiexec = (launcher.pid for launcher in ranks._launchers)
    print(json.dumps({
        "name": ranks._place.name, "home": str(ranks._place.home), "memory": str(ranks._place.memory),
        "notebook": os.getpid(), "reaper": ranks._reaper.pid, "controller": controller, "mpiexec": mpiexec,
    }), flush=True)
"""
THEN_CALL = """
    for line in sys.stdin:
        try:
            said = cluster.call(lambda host: host.world.all_gather(host.world.rank))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps([ranks._reaper.pid, said]), flush=True)
"""


class Notebook:
    """A Python process with a cluster of 2 ranks; with a kind of death as its name."""

    def __init__(self, runtime: Path) -> None:
        environment = os.environ | {"XDG_RUNTIME_DIR": str(runtime), "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", NOTEBOOK + THEN_CALL],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.runtime = runtime

    def wait_until_ready(self) -> Notebook:
        self.cluster = json.loads(self.process.stdout.readline())
        return self

    def kill(self, *who: str) -> None:
        for each in who:
            os.kill(self.cluster[each], signal.SIGKILL)

    def call(self) -> list:
        """The reaper's pid, and the answer or the error."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory) -> Iterator[dict[str, Notebook]]:
    started = {name: Notebook(tmp_path_factory.mktemp(name)) for name in ("mpiexec", "controller", "everything")}
    try:
        yield {name: notebook.wait_until_ready() for name, notebook in started.items()}
    finally:
        for notebook in started.values():
            notebook.end()


def list_family(name: str) -> list[psutil.Process]:
    """Processes of the cluster of that name, zombies left out."""
    return [process for process in reaper_process._find_marked(name) if reaper_process.is_running(process)]


def wait_within(seconds: float, condition: Callable[[], object]) -> bool:
    until_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True


def list_left(cluster: dict, runtime: Path) -> list[object]:
    """What there still is of it."""
    paths = [Path(cluster["home"]), Path(cluster["memory"]), *runtime.glob("mpi4dl_nb/*")]
    return [*list_family(cluster["name"]), *(path for path in paths if path.exists())]


def check_gone(cluster: dict, runtime: Path) -> None:
    assert wait_within(GONE_S, lambda: not list_left(cluster, runtime)), list_left(cluster, runtime)


def check_all_there(cluster: dict, runtime: Path) -> None:
    """Or its absence would say nothing: two ranks, their nannies, mpiexec and the controller; folders with files."""
    assert len(list_family(cluster["name"])) >= 6
    assert list(Path(cluster["home"]).glob("ompi.*"))
    assert list(Path(cluster["memory"]).glob("sm_segment.*"))
    assert len(list(runtime.glob("mpi4dl_nb/*.json"))) == 1


@pytest.mark.nightly
@pytest.mark.parametrize(("who", "is_asked"), [("mpiexec", "later"), ("controller", "at once")])
def test_a_killed_process_that_all_depend_on_takes_all_with_it_and_the_notebook_reports_it(notebooks, who, is_asked):
    """Also if it asks when all have ended: then the reaper knows which was the first."""
    notebook = notebooks[who]
    check_all_there(notebook.cluster, notebook.runtime)
    notebook.kill(who)
    if is_asked == "later":
        check_gone(notebook.cluster, notebook.runtime)
    named = {"mpiexec": "mpiexec", "controller": "the controller of the ranks"}[who]
    told = f"its process has ended with {named} (process {notebook.cluster[who]})"
    assert wait_within(3, lambda: told in notebook.call()[1])
    check_gone(notebook.cluster, notebook.runtime)


@pytest.mark.nightly
def test_a_killed_reaper_is_replaced(notebooks):
    notebook = notebooks["everything"]
    first = notebook.cluster["reaper"]
    notebook.kill("reaper")
    assert wait_within(5, lambda: notebook.call()[0] != first)
    notebook.cluster["reaper"], said = notebook.call()
    assert said == [[0, 1], [0, 1]]


@pytest.mark.nightly
def test_what_even_the_reaper_did_not_survive_is_ended_by_the_next_start(notebooks, monkeypatch, tmp_path):
    notebook = notebooks["everything"]
    check_all_there(notebook.cluster, notebook.runtime)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(notebook.runtime))
    assert remove_stale_clusters() == []  # its notebook lives
    os.kill(notebook.cluster["reaper"], signal.SIGSTOP)
    notebook.kill("notebook", "reaper")
    time.sleep(1)
    check_all_there(notebook.cluster, notebook.runtime)

    CASES["no_mpiexec"].provoke(monkeypatch, tmp_path)
    with pytest.raises(RankError, match="no mpiexec"):  # the start itself is not needed for it
        MpiRanks(2)
    assert list_left(notebook.cluster, notebook.runtime) == []


@pytest.mark.nightly
def test_a_jupyter_kernel_that_is_restarted_or_killed_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    try:
        for end in (manager.restart_kernel, lambda: manager.shutdown_kernel(now=True)):
            cluster = start_in(manager)
            check_all_there(cluster, tmp_path)
            end()
            check_gone(cluster, tmp_path)
    finally:
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)


def start_in(manager: KernelManager) -> dict:
    """Start a cluster in a kernel; what it printed."""
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        printed: list[str] = []

        def keep(message: dict) -> None:
            content = message["content"]
            if content.get("name") == "stderr":  # that the start is slow, where it is
                return
            printed.append(content.get("text", "") or "\n".join(content.get("traceback", [])))

        client.execute_interactive(NOTEBOOK, timeout=60, output_hook=keep)
        return json.loads("".join(printed))
    finally:
        client.stop_channels()


# What follows needs no MPI.

SLEEPER = "import time; print(1, flush=True); time.sleep(600)"


@pytest.fixture
def sleeper() -> Iterator[Callable[..., subprocess.Popen]]:
    """`sleeper(name)` is a process of the cluster of that name, in a session of its own."""
    begun: list[subprocess.Popen] = []

    def begin(name: str, code: str = SLEEPER) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | {MARK: name}, stdout=subprocess.PIPE, start_new_session=True
        )
        begun.append(process)
        process.stdout.readline()
        return process

    yield begin
    for process in begun:
        process.kill()
        process.wait()
        process.stdout.close()


NAME = "mpi4dl_nb-testtest"


def test_a_stopped_process_is_ended_too_and_one_of_another_cluster_is_not(sleeper):
    mine, other = sleeper(NAME), sleeper("mpi4dl_nb-anothers")
    mine.send_signal(signal.SIGSTOP)
    reaper_process.end_cluster(NAME)
    assert mine.wait(1) == -signal.SIGTERM
    assert other.poll() is None


def test_a_process_that_does_not_want_to_end_is_killed(sleeper, monkeypatch):
    monkeypatch.setattr(reaper_process, "_ORDERLY_S", 0.3)
    stubborn = sleeper(NAME, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER)
    reaper_process.end_cluster(NAME)
    assert stubborn.wait(1) == -signal.SIGKILL


@pytest.mark.nightly
def test_the_reaper_ends_all_when_its_notebook_is_killed(sleeper, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    rank = sleeper(NAME)
    script = f"""if True:
        import os, pathlib, signal
        from mpi4dl_nb.launch.reaper_process import Reaper
        Reaper({NAME!r}, [pathlib.Path({str(home)!r})])
        if os.fork():
            signal.pause()
        # A worker of the notebook, which has its pipes, and outlives it.
        print(os.getpid(), flush=True)
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    """
    done = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    worker = int(done.stdout.readline())
    try:
        done.wait()
        assert wait_within(GONE_S, lambda: rank.poll() is not None and not home.exists())
    finally:
        os.kill(worker, signal.SIGKILL)
        done.stdout.close()


def test_the_reaper_knows_which_process_ended_first(sleeper):
    first, second = sleeper(NAME), sleeper(NAME)
    reaper = Reaper(NAME, [])
    for each in (first, second):
        reaper.add_process(each.pid)
    assert reaper.get_ended_pids() == []
    second.kill()
    assert first.wait(GONE_S) == -signal.SIGTERM
    assert reaper.get_ended_pids() == [second.pid]
    reaper.end_cluster(GONE_S)
    assert reaper.get_ended_pids() == [second.pid]


def test_a_reaper_that_was_killed_still_lets_go(sleeper, tmp_path):
    rank = sleeper(NAME)
    reaper = Reaper(NAME, [])
    os.kill(reaper.pid, signal.SIGKILL)
    reaper.end_cluster(GONE_S)
    assert rank.wait(1) == -signal.SIGTERM


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Callable[..., Path]:
    """`kept(process, **changes)` is the record of a cluster whose notebook is that process."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def keep(notebook: subprocess.Popen, began: float | None = None, **changes: object) -> Path:
        fields = {
            "name": NAME,
            "folders": [],
            "processes": [[notebook.pid, began or reaper_process.get_start_time(notebook.pid)]],
        }
        fields |= dict(zip(("host", "boot", "pids"), run_directory._identify_machine(), strict=True)) | changes
        path = run_directory._find_runtime_folder() / f"{fields['name']}.json"
        path.write_text(json.dumps(fields))
        return path

    return keep


def test_a_cluster_whose_notebook_lives_is_left_alone(kept, sleeper):
    notebook, rank = sleeper("-"), sleeper(NAME)
    path = kept(notebook)
    assert remove_stale_clusters() == []
    notebook.kill()
    notebook.wait()
    assert remove_stale_clusters() == [NAME]
    assert rank.wait(1) == -signal.SIGTERM
    assert not path.exists()


def test_a_later_process_with_the_same_pid_is_neither_the_notebook_nor_killed(kept, sleeper):
    bystander = sleeper("-")
    kept(bystander, began=1.0)
    assert remove_stale_clusters() == [NAME]
    assert bystander.poll() is None


@pytest.mark.parametrize("elsewhere", [{"host": "another"}, {"pids": "pid:[1]"}])
def test_a_record_of_another_machine_or_container_is_left_alone(kept, sleeper, elsewhere):
    rank = sleeper(NAME)
    path = kept(sleeper("-"), began=1.0, **elsewhere)
    assert remove_stale_clusters() == []
    assert path.exists()
    assert rank.poll() is None


def test_after_a_boot_only_folders_are_removed(kept, sleeper, tmp_path):
    bystander, home = sleeper("-"), tmp_path / NAME
    home.mkdir()
    kept(bystander, boot="before", folders=[str(home)])
    assert remove_stale_clusters() == [NAME]
    assert bystander.poll() is None
    assert not home.exists()


def test_no_folder_is_removed_but_those_of_clusters(kept, sleeper, tmp_path):
    precious, link = tmp_path / "precious", tmp_path / NAME
    precious.mkdir()
    (precious / "thesis").touch()
    link.symlink_to(precious)
    kept(sleeper("-"), began=1.0, folders=[str(precious), str(link), f"{precious}/../precious", "/"])
    assert remove_stale_clusters() == [NAME]
    assert (precious / "thesis").exists()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", '"name"', "{}", "[" * 60_000, "1" * 5000, '{"name": 1e999}', "\0", "x" * 200_000, "NaN"],
    ids=range(11),
)
def test_a_damaged_record_is_put_away(kept, sleeper, text):
    path = kept(sleeper("-"))
    path.write_text(text)
    assert remove_stale_clusters() == []
    assert not path.exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"name": ""},
        {"name": "../../etc"},
        {"name": 3},
        {"processes": []},
        {"processes": [["1"]]},
        {"processes": [[{}, 1]]},
        {"folders": [3]},
        {"host": None},
        {"more": 1},
    ],
    ids=str,
)
def test_a_record_of_the_wrong_form_is_put_away(kept, sleeper, fields):
    path = kept(sleeper("-"))
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    assert remove_stale_clusters() == []
    assert not path.exists()


def test_a_link_is_not_read(kept, sleeper, tmp_path):
    path = kept(sleeper("-"), began=1.0)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert remove_stale_clusters() == []


def test_a_folder_that_others_can_write_is_not_used(tmp_path, monkeypatch):
    for variable in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "mpi4dl_nb"
    folder.mkdir()
    folder.chmod(0o777)
    assert run_directory._find_runtime_folder() == tmp_path / "home" / ".cache" / "mpi4dl_nb"
    assert run_directory._find_runtime_folder().stat().st_mode & 0o777 == 0o700


def test_without_any_folder_there_are_no_records(monkeypatch):
    for variable, value in (("XDG_RUNTIME_DIR", "relative"), ("XDG_CACHE_HOME", "/dev/null"), ("HOME", "/proc/self")):
        monkeypatch.setenv(variable, value)
    assert run_directory._find_runtime_folder() is None
    assert remove_stale_clusters() == []


def test_a_record_reads_as_it_was_written(tmp_path, monkeypatch):
    from mpi4dl_nb.launch.run_directory import RunDirectory

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    place = RunDirectory(tmp_path / NAME, tmp_path / NAME)
    path = PidFile.of(place, os.getppid()).write()
    assert path.stat().st_mode & 0o777 == 0o600
    assert PidFile.read(path) == PidFile.of(place, os.getppid())
    assert not PidFile.read(path).is_stale()
    assert [each.name for each in path.parent.iterdir()] == [path.name]
