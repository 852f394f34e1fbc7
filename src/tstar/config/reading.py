"""From a recipe's name or a file, and overrides, to a configuration."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tstar.config.building import build_record
from tstar.config.overrides import apply_override
from tstar.config.run import RunConfig
from tstar.config.text import parse_file
from tstar.errors import UserError

RECIPES = Path(__file__).parent.parent / "recipes"

_EXTENDS = "extends"


def list_recipes() -> list[str]:
    """The names of the recipes that come with tstar."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_config(source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that a recipe's name or a file gives, with overrides like ``rollout.num_samples=8``
    on top of it, checked."""
    values = read_source(source)
    for override in overrides:
        apply_override(values, override)
    return read_config(values).check()


def read_config(values: Mapping[str, Any]) -> RunConfig:
    """The configuration of plain values."""
    config: RunConfig = build_record(RunConfig, values, "")
    return config


def read_source(source: str) -> dict[str, Any]:
    """The plain values of a recipe or a file, on top of what it extends."""
    return _read_extended(_find(source, Path()), ())


# -- recipes -----------------------------------------------------------------------------------


def _find(source: str, directory: Path) -> Path:
    """The file of a shipped recipe, or a file of the user's."""
    if Path(source).suffix in (".yaml", ".yml"):
        return directory / source
    for name in (source, f"{source}-tstar"):  # a model's name alone is its T*
        if name in list_recipes():
            return RECIPES / f"{name}.yaml"
    near = difflib.get_close_matches(source, list_recipes(), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(list_recipes())}, or a .yaml file"
    raise UserError(f"recipe: {source!r} is unknown; {hint}")


def _read_extended(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        raise UserError(f"{path}: extends itself, by way of {seen[-1]}; take one `extends` out")
    values = parse_file(path)
    parent = values.pop(_EXTENDS, None)
    if parent is None:
        return values
    if not isinstance(parent, str):
        raise UserError(f"{path}: extends: {parent!r} is no recipe; give one name or file")
    return merged(_read_extended(_find(parent, path.parent), (*seen, path)), values)


def merged(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Two mappings as one: sections are merged, all else is the upper one's."""
    result = dict(lower)
    for key, value in upper.items():
        below = result.get(key)
        is_section = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merged(below, value) if is_section else value  # type: ignore[arg-type]
    return result
