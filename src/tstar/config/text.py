"""YAML as its version 1.2 has it: `off` is a word, 1e-6 is a number, and no key stands there twice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from tstar.errors import UserError


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
    """PyYAML follows version 1.1, where `off` is false, `1e-6` a string and `1:30` ninety."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool) or key in seen:
                line = key_node.start_mark.line + 1
                fault = "stands there twice" if isinstance(key, str | int) else "is no name"
                raise UserError(f"line {line}: {key!r} {fault}; keep one")
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
for _tag, _pattern, _first_characters in (
    ("null", r"~|null|Null|NULL|", ["", *"~nN"]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+", [*"-+0123456789"]),
    ("float", _FLOAT, [*"-+.0123456789"]),
):
    _expression = re.compile(rf"^(?:{_pattern})$")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _expression, _first_characters)


_Loader.add_constructor(
    "tag:yaml.org,2002:int",
    lambda loader, node: int(loader.construct_scalar(node)),  # version 1.1 reads 010 as eight
)


def parse_yaml(text: str, place: str) -> Any:
    """What a text says; `place` is where it stands, for messages."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  (a SafeLoader with fewer words)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark is not None and "\n" in text else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise UserError(f"{place}:{line} no valid YAML ({problem}); correct it") from error
    except RecursionError as error:
        raise UserError(f"{place}: is nested too deeply; correct it") from error
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


def parse_file(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8 text"
        raise UserError(f"{path}: cannot be read ({reason}); correct the path") from error
    content = parse_yaml(text, str(path))
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: holds {type(content).__name__}, no settings; write `name: value` lines")
    return dict(content)


def to_yaml(config: object) -> str:
    """A configuration as a file that reads back equal."""
    text: str = yaml.safe_dump(
        to_plain(config), sort_keys=False, allow_unicode=True, default_flow_style=None, width=110
    )
    return text


def to_plain(value: object) -> Any:
    """Records, tuples and paths as mappings, lists and strings."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
