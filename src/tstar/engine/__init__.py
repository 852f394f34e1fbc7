"""The sampling engine: requests in, trajectories out (docs/engine.md)."""

from tstar.engine.engine import Engine
from tstar.engine.request import (
    EngineConfig,
    Event,
    FindStop,
    GenerationError,
    RefusedError,
    Request,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    TokensUnmasked,
)

__all__ = [
    "Engine",
    "EngineConfig",
    "Event",
    "FindStop",
    "GenerationError",
    "RefusedError",
    "Request",
    "RequestFailed",
    "RequestFinished",
    "SamplingParams",
    "TokensUnmasked",
]
