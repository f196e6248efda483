"""A training across two hosts that are network namespaces of this machine; one loses its network.

`python -m tests.hosts` does more of it. It needs root, `ip` and `sshd`, and is left out where there can be none.
"""

from __future__ import annotations

import os
import shutil
import socket
import time

import pytest
import torch
from jupyter_client.localinterfaces import local_ips
from torch import nn

from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.engines.errors import RankError
from tests.hosts import list_processes_left
from tests.namespaces import find_obstacle, open_namespaces

N, SHAPE = 2, (2, 3, 12, 12)
PLAN = Plan(split_size=1, num_spatial_parts=2, slice_method="vertical", precision="float64")
NAMED = r"Rank 1: its host node2 \(rank 1\) has not answered for \d\.\d s: it is down, or its network is\. Call heal"


@pytest.fixture(scope="module")
def hosts():
    if why := find_obstacle():
        pytest.skip(why)
    local_ips()  # Jupyter keeps them, and the hosts' network comes later
    with open_namespaces(2) as hosts:
        yield hosts


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


@pytest.mark.nightly
def test_an_unknown_host_key_is_reported(hosts):
    known = hosts.home / "known_hosts"
    keys = known.read_text()
    try:
        known.write_text("")
        with pytest.raises(RankError, match="The host node1 can't be used: its host key is unknown here"):
            Cluster(N, hosts=hosts.names).start()
    finally:
        known.write_text(keys)


@pytest.mark.nightly
def test_a_host_without_our_key_is_reported(hosts):
    key = hosts.home / "key.pub"
    shutil.move(key, key.with_suffix(".away"))
    try:
        with pytest.raises(RankError, match="The host node1 can't be used: ssh does not log in there"):
            Cluster(N, hosts=hosts.names).start()
    finally:
        shutil.move(key.with_suffix(".away"), key)


def test_a_training_runs_across_hosts_and_goes_on_without_the_one_that_is_cut_off(hosts):
    def place(host):
        return socket.gethostname(), int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])

    with Cluster(N, hosts=hosts.names) as cluster:
        assert sorted(cluster.call(place)) == [("node1", 0), ("node2", 0)]
        assert Training(make_net(), PLAN, cluster, SHAPE).verify()["ok"]

        hosts.set_link("node2", up=False)
        start_s = time.monotonic()
        with pytest.raises(RankError, match=NAMED) as told:
            cluster.call(lambda host: host.world.all_gather(None))
        assert time.monotonic() - start_s < 10
        assert told.value.rank == 1

        cluster.heal()
        assert sorted(cluster.call(place)) == [("node1", 0), ("node1", 1)]
    assert not list_processes_left(hosts, ["node1"], 10.0)
