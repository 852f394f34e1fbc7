"""Overrides: ``rollout.num_samples=8`` into the plain values of a configuration.

A name is looked up in the types, so a wrong one is refused where it is wrong. Entries of a list go by
number (``rewards.terms.0.weight=2``), stages by block size (``curriculum.stages.8.num_updates=20``).
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Union, get_args, get_origin

from tstar.config.building import check_known, join, types_of
from tstar.config.run import RunConfig
from tstar.config.text import parse_yaml
from tstar.errors import UserError


def apply_override(values: dict[str, Any], override: str) -> None:
    """Put ``a.b.c=value`` into plain values, in place; the value is read as YAML."""
    name, equals, text = override.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or not all(name.split(".")):
        raise UserError(f"{override}: is no override; write NAME=VALUE, like rollout.num_samples=8")
    values |= _put(RunConfig, values, name.split("."), parse_yaml(text, name), "")


def _put(kind: Any, current: Any, names: Sequence[str], value: Any, path: str) -> Any:
    """What stands at `path` now, a value of this type, with the value put in its place below."""
    if not names:
        return value
    (name, *rest), members = names, _members(kind)
    for member in members:
        if is_dataclass(member):
            hints = types_of(member)  # type: ignore[arg-type]
            check_known(name, hints, path)
            section = dict(current) if isinstance(current, Mapping) else {}
            section[name] = _put(hints[name], section.get(name), rest, value, join(path, name))
            return section
        origin, arguments = get_origin(member), get_args(member)
        if origin is tuple and arguments[1:] == (Ellipsis,):
            entries = list(current or [])
            number = _number(name, "number of an entry, from 0", path)
            if number >= len(entries):
                raise UserError(
                    f"{join(path, name)}: there are {len(entries)} entries, counted from 0; "
                    f"give them all, {path}=[...]"
                )
            entries[number] = _put(arguments[0], entries[number], rest, value, join(path, name))
            return entries
        if isinstance(origin, type) and issubclass(origin, Mapping):
            section = dict(current or {})
            key = _number(name, "block size", path) if arguments[0] is int else name
            section[key] = _put(arguments[1], section.get(key), rest, value, join(path, name))
            return section
    raise UserError(f"{path}: is one value and has no {name}; give {path}=VALUE")


def _number(name: str, what: str, path: str) -> int:
    if not name.isdecimal():
        raise UserError(f"{join(path, name)}: {name!r} is no {what}; write {path}.NUMBER")
    return int(name)


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
