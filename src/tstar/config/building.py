"""From plain values (YAML, overrides) to records, with messages that name the field in full."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import pydantic

from tstar.errors import UserError


def build(kind: Any, value: Any, path: str) -> Any:
    """A value of this type: a record, a tuple or mapping of records, or a leaf that pydantic reads."""
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    record = next((m for m in members if is_dataclass(m)), None)
    if record is not None and (isinstance(value, Mapping) or len(members) == 1):
        return build_record(cast(type, record), value, path)
    many = next((m for m in members if _item_of(m) is not None), None)
    if value is None and type(None) in members:
        return None
    if many is not None and value is not None:
        return _build_many(many, value, path)
    leaves = tuple(m for m in members if not is_dataclass(m))
    if leaves == (type(None),):
        raise UserError(f"{path}: {_show(value)} is no section; give its fields, or null")
    return _read_leaf(Union[leaves], value, path)  # noqa: UP007  (made at run time)


def build_record(kind: type, value: Any, path: str) -> Any:
    """A record of a mapping; its own refusals get the path in front."""
    if is_dataclass(value):
        return value
    if not isinstance(value, Mapping):
        raise UserError(
            f"{path}: {_show(value)} is no section; give its fields, like {path}.{fields(kind)[0].name}"
        )
    hints = types_of(kind)
    for name in value:
        check_known(str(name), hints, path)
    for field in fields(kind):
        if field.name not in value and field.default is field.default_factory is MISSING:
            raise UserError(f"{join(path, field.name)}: is missing; give it")
    given = {name: build(hints[name], inner, join(path, name)) for name, inner in value.items()}
    try:
        return kind(**given)
    except (UserError, ValueError) as error:
        raise UserError(_locate(str(error), kind, path)) from error


def check_known(name: str, known: Iterable[str], path: str) -> None:
    """Refuse a name that is none of these, with the nearest that is."""
    names = sorted(known)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {join(path, near[0])}?" if near else f"use one of {', '.join(names)}"
    raise UserError(f"{join(path, name)}: there is no such setting; {hint}")


@cache
def types_of(kind: type) -> Mapping[str, Any]:
    """The type of each field of a record, in order."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


# -- private -----------------------------------------------------------------------------------


def _item_of(kind: Any) -> Any:
    """The record that a ``tuple[Record, ...]`` or a ``Mapping[int, Record]`` holds; None for others."""
    arguments = get_args(kind)
    is_tuple = get_origin(kind) is tuple and arguments[1:] == (Ellipsis,)
    item = arguments[0] if is_tuple else arguments[1] if _is_mapping(kind) else None
    return item if is_dataclass(item) else None


def _is_mapping(kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _build_many(kind: Any, value: Any, path: str) -> Any:
    item = _item_of(kind)
    if _is_mapping(kind):
        if not isinstance(value, Mapping):
            raise UserError(f"{path}: {_show(value)} is no mapping; write `KEY: {{...}}` lines")
        keys = {key: _read_leaf(get_args(kind)[0], key, f"{path}: key") for key in value}
        return {keys[key]: build(item, inner, join(path, key)) for key, inner in value.items()}
    if not isinstance(value, list | tuple):
        raise UserError(f"{path}: {_show(value)} is no list; write [{{...}}]")
    return tuple(build(item, inner, join(path, number)) for number, inner in enumerate(value))


def _read_leaf(kind: Any, value: Any, path: str) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{path}: {_show(value)} cannot be used; use a finite number")
    is_word = isinstance(value, bool) and bool not in (kind, *get_args(kind))
    try:
        # pydantic would take true for 1.
        return _adapter(kind).validate_python(_show(value) if is_word else value)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        wanted = "; ".join(dict.fromkeys(_explain(each) for each in error.errors()))
        where = path if len(error.errors()) > 1 else ".".join([path, *_index(first)])
        raise UserError(f"{where}: {_show(value)} cannot be used; {wanted}") from error


@cache
def _adapter(kind: Any) -> Any:
    """pydantic's reader of a type."""
    return pydantic.TypeAdapter(kind)


def _index(error: Any) -> list[str]:
    return [str(part) for part in error["loc"] if isinstance(part, int)]


_EXPLAINED = {
    "none_required": "or null",
    "bool_parsing": "use true or false",
    "bool_type": "use true or false",
    "int_parsing": "use a whole number",
    "int_type": "use a whole number",
    "int_from_float": "use a whole number",
    "float_parsing": "use a number",
    "float_type": "use a number",
    "string_type": "use a text",
    "path_type": "use a path",
    "tuple_type": "use a list, as [...]",
    "missing": "the list is too short",
    "too_long": "the list is too long",
}
"""What pydantic finds wrong, by its kind, in our words."""


def _explain(error: Any) -> str:
    message: str = error["msg"].removeprefix("Input ").removeprefix("Value ")
    expected = error.get("ctx", {}).get("expected")
    if error["type"] == "literal_error" and expected:
        return f"use {expected}"
    return _EXPLAINED.get(error["type"], message)


def _locate(message: str, kind: type, path: str) -> str:
    """A record's own message, `field: ...`, with the field's full name in front."""
    head, colon, rest = message.partition(":")
    *_, field_name = head.split(".")
    if colon and field_name in types_of(kind):
        return f"{join(path, field_name)}:{rest}"
    return f"{path}: {message}" if path else message


def _show(value: Any) -> str:
    """As YAML has it."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
