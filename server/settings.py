"""What the command line tells the HTTP side. Imports nothing, so that the engine's process can start before HTTP's
packages are imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class ServerOptions:
    """How the HTTP side behaves.

    Attributes:
        served_model_name: the model's name in the API; None is the engine's name for it.
        api_key: what clients must send as a bearer token; None is no check.
        max_body_size: bytes of a request's body.
        cors_origins: origins whose pages may call this server; "*" is all.
        metrics_prefix: what metrics are called before the colon.
    """

    served_model_name: str | None = None
    api_key: str | None = None
    max_body_size: int = 32 * MIB
    cors_origins: Sequence[str] = ()
    metrics_prefix: str = "octavo"
