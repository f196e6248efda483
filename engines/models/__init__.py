"""The benchmark models as plain PyTorch modules, without any code for parallelism."""

from __future__ import annotations

from engines.models.amoebanet import amoebanetd
from engines.models.resnet import resnet20_v1, resnet110_v2, resnet_v1, resnet_v2

__all__ = ["amoebanetd", "resnet20_v1", "resnet110_v2", "resnet_v1", "resnet_v2"]
