"""The guards in conftest.py guard: shapes, seeds, network."""

import random
import socket

import pytest
import torch
from jaxtyping import TypeCheckError

from tstar import doctor

NOWHERE = ("192.0.2.1", 80)
"""An address that is reserved for documentation."""


def test_signatures_are_checked() -> None:
    with pytest.raises(TypeCheckError, match="num_bytes"):
        doctor.format_bytes("1")
    with pytest.raises(TypeCheckError, match="finding"):
        doctor.Note(1, "fix")


@pytest.mark.usefixtures("types_unchecked")
def test_signatures_are_unchecked_on_request() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        doctor.format_bytes("1")
    assert doctor.Note(1, "fix").finding == 1


@pytest.mark.parametrize("attempt", ["connect", "connect_ex"])
def test_connections_to_others_fail_the_test(attempt: str) -> None:
    with socket.socket() as client, pytest.raises(pytest.fail.Exception, match="network"):
        getattr(client, attempt)(NOWHERE)


def test_names_of_others_fail_the_test() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"it wanted huggingface\.co"):
        socket.create_connection(("huggingface.co", 443))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_connections_to_oneself_are_free(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection((host, server.getsockname()[1])).close()


@pytest.mark.parametrize("attempt", [1, 2])
def test_seeds_are_fixed(attempt: int) -> None:
    torch_draw, draw = torch.rand(()).item(), random.random()
    assert (torch_draw, draw) == pytest.approx((0.4962565899, 0.8444218515))


def test_one_thread() -> None:
    assert torch.get_num_threads() == 1
