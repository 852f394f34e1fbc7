"""All settings with their defaults and docstrings, as docs/config.md has them.

python -m tstar.config.reference > docs/config.md
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from tstar.config.building import join, types_of
from tstar.config.run import RunConfig
from tstar.config.text import to_plain

HEADER = """# Settings

Every setting of `tstar train`: in a recipe as YAML (`rollout: {num_samples: 8}`), on the command line as
`rollout.num_samples=8` or `--rollout.num-samples 8`. Defaults are in brackets, `null` is no value. Entries of
lists go by number from 0, stages by block size. How runs go is in [train.md](train.md).

Made by `python -m tstar.config.reference > docs/config.md`.
"""


@dataclass(frozen=True)
class Setting:
    """One setting, or the beginning of a section."""

    name: str
    """In full."""
    kind: str
    default: str
    text: str
    """Its docstring."""
    section: str | None = None
    """What its section is, if it has settings of its own."""


def list_settings(kind: type = RunConfig, path: str = "") -> Iterator[Setting]:
    """Every field of a record, then those of the records in it."""
    texts = docstrings(kind)
    for field in sorted(fields(kind), key=lambda f: _record_in(types_of(kind)[f.name])[0] is not None):
        name, hint = join(path, field.name), types_of(kind)[field.name]
        record, key = _record_in(hint)
        section = None if record is None else inspect.getdoc(record)
        yield Setting(name, _show_type(hint), _show_default(field), texts.get(field.name, ""), section)
        if record is not None:
            yield from list_settings(record, join(name, key) if key else name)


@cache
def docstrings(kind: type) -> Mapping[str, str]:
    """The docstring under each field of a record, those of its parents included."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if not is_dataclass(each):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def to_markdown() -> str:
    """docs/config.md."""
    lines = [HEADER]
    for setting in list_settings():
        if setting.section is not None:
            text = " ".join((setting.text or setting.section).split())
            off = ". Default: null" if setting.default == "null" else ""
            lines.append(f"\n## `{setting.name}`\n\n{text.rstrip('.')}{off}.\n")
        else:
            default = f" (`{setting.default}`)" if setting.default else ""
            lines.append(f"- `{setting.name}`: {setting.kind}{default}. {setting.text}")
    return "\n".join(lines) + "\n"


# -- private -----------------------------------------------------------------------------------


def _record_in(hint: Any) -> tuple[type | None, str]:
    """The record that a type holds, and what an entry is called where it holds several."""
    for member in _members(hint):
        if is_dataclass(member):
            return member, ""  # type: ignore[return-value]
        origin, arguments = get_origin(member), get_args(member)
        if arguments and is_dataclass(arguments[0]):
            return arguments[0], "NUMBER"  # type: ignore[return-value]
        if isinstance(origin, type) and issubclass(origin, Mapping) and is_dataclass(arguments[1]):
            return arguments[1], "BLOCK_SIZE"  # type: ignore[return-value]
    return None, ""


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _show_type(hint: Any) -> str:
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", types.NoneType: ""}
    shown = []
    for member in _members(hint):
        if get_origin(member) is Literal:
            shown += [str(value) for value in get_args(member)]
        elif get_origin(member) is tuple:
            shown.append("list")
        elif member in names:
            shown.append(names[member])
        else:
            shown.append(getattr(member, "__name__", str(member)).lower())
    return " | ".join(filter(None, shown))


def _show_default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return ""
    value = to_plain(field.default)
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else "" if value in ("", ".") else str(value)


if __name__ == "__main__":
    sys.stdout.write(to_markdown())
