"""The model of trainings that are killed: it draws, and has weights enough that writing them takes its time."""

from __future__ import annotations

import os
import signal
import threading
import time

from torch import nn


def make_survivor() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2),
        nn.Conv2d(16, 64, 3, padding=1, stride=2, bias=False), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 16000), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16000, 10),
    )  # fmt: skip


def make_stopping_survivor() -> nn.Module:
    """The same; on rank 1 its process is told to end, some time after it has begun to listen."""
    if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
        threading.Thread(target=_stop, daemon=True).start()
    return make_survivor()


def _stop() -> None:
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGTERM)
