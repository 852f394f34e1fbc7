"""What holds for every test: checked shapes, one thread, fixed seeds, no network."""

import ipaddress
import os
import random
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from jaxtyping import config, install_import_hook

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

# From here on every function of tstar checks its arguments and its result against its signature,
# shapes included. Users do not pay for it: outside pytest nothing is checked. A Protocol in a
# signature has to be @runtime_checkable for this.
install_import_hook("tstar", "beartype.beartype")

import torch  # noqa: E402  (the Hub's variables must stand before anything reads them)

# One thread: sums are taken in the same order on every machine, so golden numbers mean something,
# and tensors as small as a test's are slower with more.
torch.set_num_threads(1)

# A shell starts what runs in its background deaf to Ctrl-C, and every child inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("desk", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "desk")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """What draws from global state (a layer's initial weights) draws the same every time."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (other people's code uses it)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection to another machine fails the test, whatever the code around it catches."""
    getaddrinfo = socket.getaddrinfo

    def guard(connect: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(self: socket.socket, address: Any) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6):
                refuse_remote(address[0])
            return connect(self, address)

        return guarded

    def guarded_getaddrinfo(host: str | None, *args: Any, **kwargs: Any) -> Any:
        refuse_remote(host)
        return getaddrinfo(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", guard(socket.socket.connect))
    monkeypatch.setattr(socket.socket, "connect_ex", guard(socket.socket.connect_ex))
    monkeypatch.setattr(socket, "getaddrinfo", guarded_getaddrinfo)


def refuse_remote(host: str | None) -> None:
    """Fail unless the host is this machine."""
    if host in (None, "", "localhost", socket.gethostname()):
        return
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        pytest.fail(f"a test may not use the network: it wanted {host}")


@pytest.fixture
def types_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """tstar as its users have it, to show what a wrong type gets from tstar itself."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The directory beside the repository with real tokenizers and configs, or a skip."""
    path = REPOSITORY.parent / "shared"
    if not path.is_dir():
        pytest.skip(f"{path} is absent: it holds files that are too large for the repository")
    return path
