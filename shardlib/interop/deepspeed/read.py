"""Reads a config against the table: values that stand for themselves, notes on what is left out, all that is wrong."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any

from shardlib.errors import ConfigError, listing, nearest
from shardlib.interop.deepspeed.keys import AUTO, HONOURED, KEYS, NOT_NEEDED, Key

Source = str | PathLike[str] | Mapping[str, Any]


@dataclass
class Settings:
    """`values` of honoured keys by path; the keys that are `given`, and of these the ones left `open`, as "auto";
    `notes`, keys that are left out, and why; `problems`, what cannot be honoured."""

    values: dict[str, Any] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    open: set[str] = field(default_factory=set)
    notes: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def get(self, path: str, default: Any = None) -> Any:
        """The value of a key, or what holds where it is not given, null or left open."""
        found = self.values.get(path)
        return default if found is None else found

    def under(self, section: str) -> list[str]:
        """The honoured keys that are given in a section, without its name."""
        return [path.removeprefix(f"{section}.") for path in self.values if path.startswith(f"{section}.")]

    def check(self) -> None:
        """Raise `ConfigError` with all problems."""
        if self.problems:
            said = "".join(f"\n  {p}" for p in dict.fromkeys(self.problems))
            raise ConfigError(f"this DeepSpeed config cannot be honoured:{said}")


def read(source: Source, auto: Mapping[str, Any], without: Sequence[str]) -> Settings:
    """The settings of a config, a file's path or a dict.

    `auto`: what "auto" stands for, by the names of the table or whole paths. `without`: globs over paths of keys that
    are left out. Raises `ConfigError` where the file is no JSON object or gives a key twice; the rest is in `problems`.
    """
    settings, unused, found = Settings(), set(without), _parsed(source)
    names = sorted({key.auto for key in KEYS.values() if key.auto})
    for name in auto:
        if name not in names and name not in KEYS:
            settings.problems.append(f"auto: there is no `{name}`{nearest(name, names)}; there are {listing(names)}")
    if isinstance(found.get("zero_optimization"), bool):  # its old form
        found = {**found, "zero_optimization": {"stage": int(found["zero_optimization"])}}
    for path, value, key in _leaves(found, ()):
        parents = [path[: i + 1] for i in range(len(path))]
        dotted = ".".join(path)
        skipped = {glob for glob in without if any(fnmatchcase(".".join(p), glob) for p in parents)}
        unused -= skipped
        settings.given.add(dotted)
        if skipped:
            settings.notes[dotted] = "left out, as asked"
        elif key is None:
            settings.problems.append(_unknown(path, value))
        else:
            _take(settings, dotted, value, key, auto)
    settings.problems += [f"without: no key of the config matches `{glob}`" for glob in sorted(unused)]
    return settings


def _take(settings: Settings, path: str, value: Any, key: Key, auto: Mapping[str, Any]) -> None:
    """Note one key."""
    if value == AUTO:
        name = path if path in auto else key.auto or ""
        if name in auto:
            value = auto[name]
        elif key.status == HONOURED and (key.auto is None or (key.auto and not key.optional)):
            given = f"auto=dict({key.auto}=...)" if key.auto else f'auto={{"{path}": ...}}'
            settings.problems.append(f'`{path}` is "auto": give its value with {given}')
            return
        else:
            settings.open.add(path)
            if key.status == NOT_NEEDED or key.under:
                settings.notes[path] = key.text
            return
    if key.rejects(value):
        settings.problems.append(f"`{path}` = {json.dumps(value, default=repr)} is rejected: {key.text}")
    elif expected := key.expected(value):
        settings.problems.append(f"`{path}` = {json.dumps(value, default=repr)}: {expected.strip()} is expected")
    elif key.status == HONOURED:
        settings.values[path] = value
    elif key.status == NOT_NEEDED or key.under:
        settings.notes[path] = key.text


def _leaves(found: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Key | None]]:
    """Every key of a config with its row of the table, None where it has none. A section that is null is none."""
    for name, value in found.items():
        path = (*above, str(name))
        key, section = _row(path), _is_section(path)
        if isinstance(value, list) and section and not key:
            value = {str(i): x for i, x in enumerate(value)}
        if key or not section:
            yield path, value, key
        elif isinstance(value, Mapping):
            yield from _leaves(value, path)
        elif value is not None:
            yield path, value, None


def _matches(path: Sequence[str], row: Sequence[str]) -> bool:
    return all(b in ("*", a) for a, b in zip(path, row, strict=False))


def _row(path: tuple[str, ...]) -> Key | None:
    return next((key for row, key in _ROWS if len(row) == len(path) and _matches(path, row)), None)


def _is_section(path: tuple[str, ...]) -> bool:
    return any(len(row) > len(path) and _matches(path, row) for row, _ in _ROWS)


_ROWS = [(tuple(key.path.split(".")), key) for key in KEYS.values()]


def _unknown(path: tuple[str, ...], value: Any) -> str:
    """Why a key has no row."""
    dotted = ".".join(path)
    if _is_section(path):
        return f"`{dotted}` = {json.dumps(value, default=repr)}: an object with keys of its own is expected"
    n = len(path)
    beside = sorted({row[n - 1] for row, _ in _ROWS if len(row) >= n and _matches(path[:-1], row)})
    hint = nearest(path[-1], beside)
    if not hint:  # perhaps it stands in the wrong place
        hint = next((f" (did you mean `{key.path}`?)" for row, key in _ROWS if row[-1] == path[-1]), "")
    return f"`{dotted}` is no key of DeepSpeed 0.19.8{hint}"


def _parsed(source: Source) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    text = Path(source).read_text()
    try:
        found = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as e:
        mend = (
            f"Comments, trailing commas and words without quotes (Hjson) have to go: python -m hjson.tool -j {source}"
        )
        raise ConfigError(f"{source} is no JSON: {e}\n  {mend}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{source} holds no JSON object, but {type(found).__name__}")
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"the DeepSpeed config gives {listing(twice)} twice in one object, beside {listing(names)}")
    return dict(pairs)
