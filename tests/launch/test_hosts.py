"""Several hosts, as far as this machine can show them: what is written of them, batch systems, hosts that fail.

Hosts that fail are programs in the place of ssh, which say what ssh says; or processes of this machine.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.engines.errors import PlanError, RankError
from mpi4dl_nb.launch import host_agent, host_agents
from mpi4dl_nb.launch.host_agents import BOOT, HostAgents
from mpi4dl_nb.launch.hosts import Hosts, choose_hosts, expand_nodes, read_allocation, read_hosts
from mpi4dl_nb.launch.mpi_library import find_mpiexec
from mpi4dl_nb.launch.multi_host import HostLost, MultiHost, RemoteShell, select_environment
from mpi4dl_nb.launch.supervisor_reports import RankExit

FAR = "192.0.2.1"  # belongs to nobody: what reaches it is the program that stands for ssh
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}


def list_shares(n: int, *hosts: str) -> list[list[int]]:
    return [list(share.ranks) for share in Hosts(read_hosts(hosts)).assign_ranks(n)]


def test_how_torch_shall_compute_is_known_on_every_host_and_so_is_the_mpi_of_mpi4py():
    asked = {"NVIDIA_TF32_OVERRIDE": "0", "PYTORCH_ALLOC_CONF": "expandable_segments:True", "MPI4DL_NB_NCCL": "0"}
    asked["MPI4PY_LIBMPI"] = "/opt/mpi/lib/libmpi.so"
    assert select_environment({**asked, "HOME": "/root", "CUDA_VISIBLE_DEVICES": "3"}) == asked


# ---- what is written of hosts


@pytest.mark.parametrize(
    ("n", "hosts", "ranks"),
    [
        (5, ["a", "b"], [[0, 1, 2], [3, 4]]),
        (5, ["a:2", "b:9"], [[0, 1], [2, 3, 4]]),
        (5, ["a", "b:3"], [[0, 1], [2, 3, 4]]),
        (2, ["a:2", "b:2"], [[0, 1]]),
        (2, ["a", "b", "c"], [[0], [1]]),
        (1, ["me@a.b-c_d"], [[0]]),
    ],
)
def test_ranks_go_to_the_hosts_in_their_order(n, hosts, ranks):
    assert list_shares(n, *hosts) == ranks


def test_hosts_may_be_a_dict_or_a_hostfile(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# ours\nnode1 slots=2\n\nnode2:3  # two GPUs\nnode3 slots = 1 max_slots=4\nnode4\n")
    assert list(map(str, read_hosts(file))) == ["node1:2", "node2:3", "node3:1", "node4"]
    assert list(map(str, read_hosts({"node1": 2, "node2": None}))) == ["node1:2", "node2"]


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ([], "names no host"),
        (["a:0"], "'a' has slots '0'"),
        (["a:-1"], "'a' has slots '-1'"),
        (["a:many"], "'a' has slots 'many'"),
        ({"a": True}, "'a' has slots True"),
        ({"a": 1.5}, "'a' has slots 1.5"),
        (["a", "b", "a"], "names 'a' 2 times"),
        (["-oProxyCommand=evil"], "no name that ssh could take"),
        (["-node1"], "no '-' at the beginning"),
        (["me@-node1"], "no '-' at the beginning"),
        (["-lroot@node1"], "no '-' at the beginning"),
        (["me@you@node1"], "no name that ssh could take"),
        (["node1\0"], r"'node1\\x00' has no name"),
        ({"node1\n-oProxyCommand=evil": 1}, "no name that ssh could take"),
        (["n" * 400], r"'nnnn.*nnn\.\.\. \(402 characters\) has no name"),
        ([":" * 1_000_000], r"\(1,000,002 characters\) must be a name"),
        ("/no/such\0file", "no hostfile that can be read .embedded null byte"),
        (["a:" + "9" * 500], "from 1 to 999,999"),
        ({"a": 10**5000}, "'a' has slots a very large int: they must be a whole number from 1 to 999,999"),
        (["a b"], "must be a name"),
        (["$(evil)"], "no name that ssh could take"),
        ([3], "must be a name"),
        (7, "must be a list"),
        ("/no/such/file", "no hostfile that can be read"),
        (["a:1", "b:2"], "4 ranks do not fit: hosts a:1, b:2 have 3 slots"),
        (["no-such-host.invalid"], "'no-such-host.invalid' has no address"),
    ],
)
def test_hosts_that_make_no_sense_are_refused_before_anything_starts(monkeypatch, hosts, said):
    monkeypatch.setattr(host_agents, "HostAgent", None)
    with pytest.raises(PlanError, match=said.replace("$", r"\$")):
        Cluster(4, hosts=hosts).start()


def test_threads_are_on_one_host():
    with pytest.raises(PlanError, match="needs backend='mpi'"):
        Cluster(2, backend="loopback", hosts=["a"])


# ---- batch systems


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("node[001-003,7],gpu1", ["node001", "node002", "node003", "node7", "gpu1"]),
        ("a", ["a"]),
        ("a,b,a", ["a", "b"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("r[1-2]n[08-09]-ib,x.y", ["r1n08-ib", "r1n09-ib", "r2n08-ib", "r2n09-ib", "x.y"]),
    ],
)
def test_short_lists_of_slurm_are_written_out(nodes, names):
    assert expand_nodes(nodes) == names


@pytest.mark.parametrize(
    "nodes", ["", "a,,b", "a[1", "a1]", "a[3-1]", "a[]", "a[x]", "a[1-2]]", "a[1,[2]]", "a[1-" + "9" * 5000 + "]"]
)
def test_lists_that_make_no_sense_are_refused(nodes):
    with pytest.raises(PlanError, match=r"hosts=\[\.\.\.\]"):
        expand_nodes(nodes)


@pytest.mark.parametrize("nodes", ["n[1-999999999]", "n[1-300][1-300]", "n[0-65535],m", "n" + "[0-9]" * 600])
def test_a_list_of_too_many_hosts_is_refused_before_it_is_written_out(nodes):
    start_s = time.monotonic()
    with pytest.raises(PlanError, match=r"stands for more than 65,536 hosts\. Name those that you need"):
        expand_nodes(nodes)
    assert time.monotonic() - start_s < 1


def test_as_many_hosts_as_slurm_itself_writes_out_are_read():
    assert expand_nodes("n[00000-65535]")[-1] == "n65535"


@pytest.mark.parametrize("name", ["-oProxyCommand=evil", "me@-oProxyCommand=evil", "$(evil)", "a b", "a\0b"])
@pytest.mark.parametrize("source", ["list", "dict", "hostfile", "Slurm", "PBS"])
def test_a_name_is_checked_wherever_it_comes_from(name, source, tmp_path):
    file = tmp_path / "nodes"
    file.write_text(f"n1\n{name}\n", encoding="utf-8")
    read = {
        "list": lambda: read_hosts(["n1", name]),
        "dict": lambda: read_hosts({"n1": 1, name: 1}),
        "hostfile": lambda: read_hosts(file),
        "Slurm": lambda: read_allocation({"SLURM_JOB_NODELIST": f"n1,{name}"}),
        "PBS": lambda: read_allocation({"PBS_NODEFILE": str(file)}),
    }
    with pytest.raises(PlanError, match=r"no name that ssh could take|must be a name"):
        read[source]()


def test_ssh_takes_a_host_for_nothing_but_a_host():
    """Whatever its name is: what comes behind "--" is no flag."""
    shell = RemoteShell()
    assert shell.make_command("node1", FAR, ["python", "-c", "1 + 1"])[-3:] == ["--", "node1", "exec python -c '1 + 1'"]
    agent = next(flag for flag in shell.make_mpiexec_flags() if flag.startswith("ssh "))
    assert agent.endswith(" -x --")


@pytest.mark.parametrize(
    ("told", "hosts"),
    [
        (SLURM, "n1:2, n2:2"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "3,1"}, "n1:3, n2:1"),
        ({"SLURM_NODELIST": "a,b,c", "SLURM_JOB_CPUS_PER_NODE": "72(x2),36"}, "a:72, b:72, c:36"),
        ({"SLURM_JOB_NODELIST": "a,b"}, "a:1, b:1"),
    ],
)
def test_a_slurm_job_has_hosts_and_slots(told, hosts):
    assert str(Hosts(read_allocation(told).hosts)) == hosts


@pytest.mark.parametrize("tasks", ["2", "2(x3)", "two", "2(x2", "2(x999999999)", "2(x" + "9" * 5000 + ")"])
def test_slots_that_do_not_fit_the_hosts_of_the_job_are_reported(tasks):
    with pytest.raises(PlanError, match="SLURM_TASKS_PER_NODE="):
        read_allocation({**SLURM, "SLURM_TASKS_PER_NODE": tasks})


def test_a_pbs_job_has_a_line_for_each_slot(tmp_path):
    file = tmp_path / "nodes"
    file.write_text("n1\nn1\nn2\nn1\n")
    job = read_allocation({"PBS_NODEFILE": str(file), "PBS_JOBID": "9.server"})
    assert (job.system, job.job, str(Hosts(job.hosts))) == ("PBS", "9.server", "n1:3, n2:1")
    with pytest.raises(PlanError, match="PBS_NODEFILE"):
        read_allocation({"PBS_NODEFILE": str(tmp_path / "none")})


def test_a_cluster_takes_the_hosts_of_its_job(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert str(Cluster(4).hosts) == "n1:2, n2:2"
    with pytest.raises(PlanError, match="5 ranks do not fit: the hosts of Slurm job 7, n1:2, n2:2 have 4 slots"):
        Cluster(5).start()
    assert str(Cluster(4, hosts=["other"]).hosts) == "other"
    assert Cluster(4, backend="loopback").hosts is None


def test_a_job_of_one_host_and_no_job_are_this_machine(monkeypatch):
    assert choose_hosts(None, several=True) is None
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "1")
    assert choose_hosts(None, several=True) is None


def test_slurm_itself_starts_the_ranks_where_it_can(monkeypatch, tmp_path):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not choose_hosts(None, several=True).srun
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    assert choose_hosts(None, several=True).srun
    assert not choose_hosts(["n1", "n2"], several=True).srun


# ---- hosts that can't be used


@pytest.fixture
def ssh(monkeypatch, tmp_path):
    """`ssh(script)`: what runs in the place of ssh; the command for the host is its `$command`."""

    def write_fake_ssh(script: str) -> None:
        file = tmp_path / "ssh"
        asks = 'case "$*" in *-G*) exit 1;; esac\nfor command; do :; done\n'
        file.write_text(f"#!/bin/sh\n{asks}{script}\n")
        file.chmod(0o755)
        monkeypatch.setenv("MPI4DL_NB_SSH", shlex.quote(str(file)))

    return write_fake_ssh


@pytest.mark.nightly
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("says", "meaning"),
    [
        ("Host key verification failed.", f"its host key is unknown here.*accept it: ssh {FAR}"),
        ("WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification failed.", f"ssh-keygen -R {FAR}"),
        (f"me@{FAR}: Permission denied (publickey).", f"without a password.*ssh-copy-id {FAR}"),
        (f"ssh: connect to host {FAR} port 22: Connection refused", "no ssh server listens"),
        (f"ssh: connect to host {FAR} port 22: Connection timed out", "can't be reached"),
        (f"ssh: connect to host {FAR} port 22: No route to host", "can't be reached"),
        ("sh: 1: exec: /opt/python: not found", "there is no .*python.* Install mpi4dl_nb there"),
        ("kex_exchange_identification: gone", "has ended with code 255 .kex_exchange_identification: gone"),
    ],
)
def test_what_ssh_says_is_reported_with_what_to_do(ssh, says, meaning):
    ssh(f"echo {shlex.quote(says)} >&2\nexit 255")
    start_s = time.monotonic()
    with pytest.raises(RankError, match=rf"(?s)The host {FAR} can't be used: .*{meaning}"):
        Cluster(2, hosts=[FAR]).start()
    assert time.monotonic() - start_s < host_agents._REPLY_S  # a host that says why is not waited for


@pytest.mark.nightly
def test_a_host_that_does_not_answer_is_not_waited_for_for_ever(ssh, monkeypatch):
    monkeypatch.setattr(host_agents, "_REPLY_S", 1.0)
    ssh("exec sleep 60")
    with pytest.raises(RankError, match=f"The host {FAR} can't be used: it has not answered within 1 s"):
        Cluster(2, hosts=[FAR]).start()


@pytest.mark.nightly
def test_a_host_without_this_python_is_reported(ssh):
    ssh(f'exec sh -c "$(echo "$command" | sed \'s#{sys.executable}#/no/such/python#\')"')
    with pytest.raises(RankError, match=f"there is no {sys.executable}. Install mpi4dl_nb there"):
        Cluster(2, hosts=[FAR]).start()


def write_other_code(folder: Path) -> None:
    (folder / "mpi4dl_nb" / "engines").mkdir(parents=True)
    (folder / "mpi4dl_nb" / "__init__.py").touch()
    (folder / "mpi4dl_nb" / "engines" / "__init__.py").write_text("# other code", encoding="utf-8")


@pytest.mark.nightly
def test_a_host_with_other_code_is_reported(ssh, tmp_path):
    """Python looks first where it was started."""
    write_other_code(tmp_path)
    ssh(f'cd {tmp_path} && exec sh -c "$command"')
    with pytest.raises(RankError, match=rf"{FAR} is not like this one: it has code of mpi4dl_nb \w+ \(here: \w+\)"):
        Cluster(2, hosts=[FAR]).start()


@pytest.mark.parametrize("name", ["MPI", "mpi4py", "torch", "Python"])
def test_other_versions_are_reported(name):
    own = host_agent.collect_versions(find_mpiexec())
    told = {"versions": {**own, name: "0.1"}, "has_folder": True}
    host_agents.check_alike("far", {"versions": own, "has_folder": True}, own, "/here")
    with pytest.raises(RankError, match=rf"The host far is not like this one: it has {name} 0.1 \(here: .*\). Install"):
        host_agents.check_alike("far", told, own, "/here")
    told["versions"].pop(name)
    with pytest.raises(RankError, match=f"{name} not at all"):
        host_agents.check_alike("far", told, own, "/here")


def test_a_host_without_the_folder_is_reported():
    own = host_agent.collect_versions(find_mpiexec())
    with pytest.raises(RankError, match="The host far has no folder /work/mine, where this notebook works"):
        host_agents.check_alike("far", {"versions": own, "has_folder": False}, own, "/work/mine")


# ---- host agents


@pytest.fixture
def post(tmp_path):
    """One on this machine, and what it tells."""
    posts = HostAgents({"here": [sys.executable, "-c", BOOT]}, str(tmp_path))
    told = posts.collect_facts({"here": "127.0.0.1"}, {"here": 1}, str(Path.cwd()), find_mpiexec())["here"]
    yield posts, told
    posts.close()


def test_a_host_agent_tells_of_its_host(post):
    _, told = post
    assert told["host"] == socket.gethostname()
    assert told["cores"] >= 1
    assert told["network"] == "127.0.0.0/8"
    assert told["versions"]["MPI"].startswith("mpiexec (Open MPI)")


def test_keys_are_for_their_owner_only_and_go_with_the_cluster(post):
    posts, _ = post
    home = Path(posts.get_folders("here")[0])
    with socket.create_server(("127.0.0.1", 0)) as controller:
        posts.send_files({"here": {"security/key": "secret"}}, controller.getsockname())
    file = home / "security" / "key"
    assert file.read_text() == "secret"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (home, file.parent, file)] == [0o700, 0o700, 0o600]
    assert "secret" not in Path(f"/proc/{posts.agents['here'].process.pid}/cmdline").read_text(encoding="utf-8")
    memory = Path(posts.get_folders("here")[1])
    assert stat.S_IMODE(memory.stat().st_mode) == 0o700
    posts.close()
    assert not home.exists()
    assert not memory.exists()


def test_a_controller_that_is_out_of_reach_is_reported(post):
    posts, _ = post
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with pytest.raises(RankError, match=rf"here can't connect to this machine at 127.0.0.1, port {port}: .*refused"):
        posts.send_files({"here": {}}, ("127.0.0.1", port))


@pytest.mark.nightly
def test_a_host_that_falls_silent_is_noticed_and_one_that_comes_back_too(post, monkeypatch):
    monkeypatch.setattr(host_agents, "SILENT_S", 1.0)
    posts, _ = post
    process = posts.agents["here"].process
    time.sleep(1.5)
    assert not posts.find_silent_hosts()
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.8)
    assert 1.0 < posts.find_silent_hosts()["here"] < 3.0
    process.send_signal(signal.SIGCONT)
    time.sleep(1.0)
    assert not posts.find_silent_hosts()
    process.kill()
    process.wait()
    assert "here" in posts.find_silent_hosts()
    for folder in posts.get_folders("here"):  # it can't do so itself any more
        shutil.rmtree(folder, ignore_errors=True)


def test_what_is_left_on_a_host_ends_when_nobody_beats_any_more(post):
    posts, _ = post
    environment = {**os.environ, "IPP_PROFILE_DIR": posts.get_folders("here")[0]}
    with subprocess.Popen(["sleep", "60"], env=environment) as left:
        posts.close()
        assert left.wait(5) == -signal.SIGKILL


# ---- what mpiexec is told


class _Agents:
    """As of two hosts, with what they were sent."""

    def __init__(self):
        self.sent: dict[str, dict[str, str]] = {}

    def get_folders(self, host):
        return {"127.0.0.1": ("/tmp/one", "/dev/shm/one"), "127.0.0.2": ("/tmp/two", "/tmp/two")}[host]

    def send_files(self, files, controller):
        self.sent.update(files)


@pytest.fixture
def across(monkeypatch, tmp_path):
    """Three ranks on two hosts, and a file of keys."""
    monkeypatch.delenv("OMPI_MCA_btl_tcp_if_include", raising=False)
    made = MultiHost(3, Hosts(read_hosts(["127.0.0.1:2", "127.0.0.2:1"])))
    networks = {"127.0.0.1": "10.1.0.0/16", "127.0.0.2": "10.2.0.0/16"}
    made._agents, made._home = _Agents(), "/tmp/mpi4dl_nb-x"
    made._facts = {host: {"cores": 8, "network": network, "home": None} for host, network in networks.items()}
    (tmp_path / "keys.json").write_text("keys", encoding="utf-8")
    return made


def test_each_host_has_its_own_share_of_cores_and_its_own_folder(across, monkeypatch, tmp_path):
    words = " ".join(across.make_engine_flags(["python", "engine"]))
    one, two = words.split(" : ")
    assert "-n 2 -H 127.0.0.1:2" in one
    assert one.endswith("--with-file /tmp/one/variables.json python engine")
    assert "-n 1 -H 127.0.0.2:1" in two
    assert two.endswith("--with-file /tmp/two/variables.json python engine")
    assert "btl_tcp_if_include 10.1.0.0/16,10.2.0.0/16" in one
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", "ib0")
    assert "btl_tcp_if_include" not in " ".join(across.make_engine_flags([]))

    across.send_files(str(tmp_path / "keys.json"), 7, "id")
    one, two = (json.loads(files["variables.json"]) for files in across._agents.sent.values())
    assert (one["OMP_NUM_THREADS"], two["OMP_NUM_THREADS"]) == ("4", "8")
    assert (one["IPP_PROFILE_DIR"], two["IPP_PROFILE_DIR"]) == ("/tmp/one", "/tmp/two")
    assert one["OMPI_MCA_btl_sm_backing_directory"] == "/dev/shm/one"
    assert (one["HOME"], one["MPI4DL_NB_MPI_HOME"]) == (None, "/tmp/one")  # the user's on that host, and MPI's
    assert across._agents.sent["127.0.0.1"].keys() == {"security/keys.json", "variables.json", "mpi4dl_nb-x"}


def test_no_command_line_shows_the_value_of_a_variable(across, monkeypatch, tmp_path):
    for name in ("PYTHONPATH", "NCCL_SOCKET_IFNAME", "TORCH_TOKEN", "LD_LIBRARY_PATH", "HOME"):
        monkeypatch.setenv(name, "/very/secret")
    assert "secret" not in " ".join(across.make_engine_flags(["python"]))
    across.send_files(str(tmp_path / "keys.json"), 7, "id")
    assert json.loads(across._agents.sent["127.0.0.1"]["variables.json"])["TORCH_TOKEN"] == "/very/secret"

    class _Commands(HostAgents):
        def __init__(self, commands, home):
            raise RankError(str(commands))

    monkeypatch.setattr("mpi4dl_nb.launch.multi_host.HostAgents", _Commands)
    across.addresses = dict.fromkeys(across.addresses, FAR)
    with pytest.raises(RankError, match=r"ssh.*127\.0\.0\.2") as told:
        across.prepare(str(tmp_path))
    assert "secret" not in str(told.value)


def test_a_host_finds_modules_where_the_notebook_does(tmp_path, monkeypatch):
    """PYTHONPATH is sent to the agent, and not written on its command line."""
    write_other_code(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import os; os.chdir('/'); os.environ.pop('PYTHONPATH', None); import runpy, sys; "
    posts = HostAgents({"here": [sys.executable, "-c", code + BOOT]}, str(tmp_path))
    try:
        with pytest.raises(RankError, match="here is not like this one: it has code of mpi4dl_nb"):
            posts.collect_facts({"here": "127.0.0.1"}, {"here": 1}, str(Path.cwd()), find_mpiexec())
    finally:
        posts.close()


# ---- a host that is lost


class _Cut:
    """Ranks of which those on the host b are cut off."""

    def find_lost_hosts(self):
        return frozenset({"b"})

    def find_lost_ranks(self):
        return {2: HostLost(None, host="b (rank 2)", silent_s=4.2), 0: RankExit(-9)}

    def stop(self):
        pass


@pytest.fixture
def cut(monkeypatch):
    """`cut(*hosts)` is a cluster of 3 ranks; what it starts anew is told as (ranks, hosts)."""
    started = []
    monkeypatch.setattr(Cluster, "_launch", lambda self: started.append((self.n, str(self.hosts))) or _Cut())

    def start_cluster(*hosts: str) -> tuple[Cluster, list[tuple[int, str]]]:
        cluster = Cluster(3, hosts=hosts).start()
        started.clear()
        return cluster, started

    return start_cluster


def test_ranks_of_a_lost_host_go_to_the_others(cut):
    cluster, started = cut("a", "b")
    cluster.heal()
    assert started == [(3, "a")]


def test_or_away(cut):
    cluster, started = cut("a:2", "b:1")
    cluster.heal(fewer=True)
    assert (started, cluster.n) == ([(2, "a:2")], 2)


def test_if_they_do_not_fit_there_nothing_has_changed(cut):
    cluster, started = cut("a:2", "b:1")
    with pytest.raises(PlanError, match="3 ranks do not fit: hosts a:2 have 2 slots together"):
        cluster.heal()
    assert (started, cluster.n, str(cluster.hosts)) == ([], 3, "a:2, b:1")


def test_no_host_is_left(cut):
    cluster, started = cut("b")
    with pytest.raises(RankError, match="None of hosts b answers"):
        cluster.heal()
    assert started == []


def test_a_cluster_shows_its_hosts():
    assert "node1:2, node2" in Cluster(3, hosts=["node1:2", "node2"])._repr_html_()
