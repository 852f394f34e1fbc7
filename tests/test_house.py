"""The guards in conftest.py guard: shapes, seeds, network. What is imported is declared."""

import ast
import random
import re
import socket
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError

from tstar import doctor

REPOSITORY = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
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


def normalised(requirement: str) -> str:
    """The name alone, in pip's spelling."""
    match = re.match(r"[\w.-]+", requirement)
    assert match
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def imported_modules() -> set[str]:
    """Top-level names that src/ imports, at the top of files and inside functions."""
    found = set()
    for path in (REPOSITORY / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"tstar"}


def test_what_is_imported_is_declared() -> None:
    extras = PROJECT["optional-dependencies"]
    declared = [*PROJECT["dependencies"], *(r for name in extras if name != "dev" for r in extras[name])]
    names = {normalised(requirement) for requirement in declared}
    providers = metadata.packages_distributions()
    undeclared = {
        module
        for module in imported_modules()
        if not {normalised(name) for name in providers.get(module, [module])} & names
    }
    assert undeclared == set()


def test_what_is_declared_is_pinned_where_it_is_installed() -> None:
    """constraints.txt has a version for everything that `make` asks for by name."""
    extras = PROJECT["optional-dependencies"]
    asked_for = {*PROJECT["dependencies"], *extras["dev"], *extras["data"], *extras["eval"]}
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {normalised(pin) for pin in pins if not pin.startswith("#")}
    assert {normalised(requirement) for requirement in asked_for} - pinned == {"tstar"}


def test_the_doctor_looks_for_every_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = {normalised(r) for name in extras if name != "dev" for r in extras[name]} - {"tqdm"}
    assert wanted <= {normalised(name) for name in doctor.PACKAGES}


def test_every_module_has_its_place_in_the_drawing() -> None:
    drawn = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    modules = {
        path.name + "/" * path.is_dir()
        for path in (REPOSITORY / "src" / "tstar").iterdir()
        if not path.name.startswith("__") and path.suffix in ("", ".py")
    }
    assert {name for name in modules if f"`{name}" not in drawn} == set()


@pytest.mark.parametrize(
    "page",
    sorted(REPOSITORY.glob("*.md")) + sorted((REPOSITORY / "docs").glob("*.md")),
    ids=lambda page: page.name,
)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_make_help_names_every_target() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE)) - {"help"}
    assert set(re.findall(r"^\t@echo \"make (\w+)", makefile, re.MULTILINE)) == targets
