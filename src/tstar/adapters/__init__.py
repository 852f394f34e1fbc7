"""Engines that others run, behind the protocol of ours: requests in, trajectories out (docs/engines.md)."""

from tstar.adapters.following import follow
from tstar.adapters.server import LmdeployServer, ResponseSource, SglangServer

__all__ = ["LmdeployServer", "ResponseSource", "SglangServer", "follow"]
