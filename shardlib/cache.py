"""Programs in a folder: traced once, loaded by the other ranks and by the next run.

A file is JSON: a first line with all that the program depends on (its key, part by part), the results, and a checksum;
then the graphs, as `graph.stored` writes them. Loading one runs no code that it holds.
"""

import hashlib
import json
import platform
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
import torch
from torch.fx import GraphModule

from shardlib import tree
from shardlib.graph import stored
from shardlib.graph.stored import Unstorable
from shardlib.identity import KNOWN, Unknown, identity, sources
from shardlib.meeting import Meeting
from shardlib.mesh import Mesh

_FORMAT = 1


@dataclass(frozen=True)
class Program:
    """What a trace gives. `results`: by leaf of the result its spec, shape, constant and the position of its output;
    `asked`: whether it holds the rank of this process."""

    module: GraphModule
    results: list[tuple[Any, tuple[int, ...], Any, int]]
    structure: optree.PyTreeSpec
    asked: bool = False


def cached(
    folder: str,
    name: str,
    parts: Mapping[str, Any],
    mesh: Mesh,
    arguments: Any,
    trace: Callable[[], Program],
    meeting: Meeting | None,
) -> Program:
    """The program of key `parts` from the folder, or traced, and written there.

    In a `meeting` the first rank traces and the others take its program, from the folder or, where that is not shared,
    from the store. What has no sure key is traced, and a line on stderr says why.
    """
    first = mesh.simulate or mesh.rank == 0
    shares = meeting if meeting is not None and first else None
    try:
        key = {part: identity(x, part if part != "function" else f"`{name}`") for part, x in _all(parts, mesh).items()}
    except Unknown as e:
        if shares:
            shares.share("")
        if first:
            _say(f"{name} is not cached: {e}")
        return trace()
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    path = Path(folder, f"{re.sub('[^A-Za-z0-9_]+', '_', name)}-{digest}.jsonl")
    text = _read(path)
    found = _loaded(text, key, mesh, arguments, str(path)) if text else None
    if found is None and meeting is not None and not first:
        text = meeting.shared()
        found = _loaded(text, key, mesh, arguments, "rank 0's program") if text else None
        if found is not None and not path.exists():
            _write(path, text)
    if found is None:
        found, text = trace(), ""
        try:
            if found.asked and mesh.total > 1:
                raise Unstorable("the rank, from mesh.index: sl.axis_index gives it as a value")
            text = _text(found, key, mesh)
            _write(path, text)
        except Unstorable as e:
            _say(f"{name} is not cached: its program holds {e}")
    if shares:
        shares.share(text)
    return found


def _all(parts: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """The parts of a key, and what every program depends on."""
    cuda = mesh.device.type == "cuda"
    sdp = [
        getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in ("flash", "mem_efficient", "math", "cudnn")
    ]
    versions = [str(getattr(sys.modules.get(root), "__version__", "")) for root in KNOWN[1:]]
    return {
        **parts,
        "mesh": (mesh.name, tuple(mesh.groups.items()), mesh.simulate, mesh.device.type),
        "versions": (_FORMAT, platform.python_implementation(), sys.version, sys.flags.optimize, *versions),
        "shardlib": sources(),
        "settings": (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()),
        "device": (*sdp, torch.cuda.get_device_name(mesh.device) if cuda else "", str(torch.get_default_device().type)),
    }


def _text(program: Program, key: Mapping[str, str], mesh: Mesh) -> str:
    body = "\n".join(stored.lines(program.module, mesh))
    head = {
        "shardlib": _FORMAT,
        "key": key,
        "results": [stored.text([*r], mesh) for r in program.results],
        "structure": stored.structure_text(program.structure, mesh),
        "sha256": hashlib.sha256(body.encode()).hexdigest(),
    }
    return f"{json.dumps(head)}\n{body}\n"


def _loaded(text: str, key: Mapping[str, str], mesh: Mesh, arguments: Any, where: str) -> Program | None:
    """The program of a text; None, and a line that says why, where it is not that of the key."""
    try:
        first, _, body = text.partition("\n")
        head = json.loads(first)
        other = [part for part, digest in key.items() if head["key"].get(part) != digest]
        if other:
            _say(f"{where} is not used, since it was made for other: {', '.join(other)}; traced here")
            return None
        if head["sha256"] != hashlib.sha256(body.removesuffix("\n").encode()).hexdigest():
            raise Unstorable("its checksum is not the one that was written")
        results = [tuple(stored.value(r, mesh)) for r in head["results"]]
        structure = stored.structure_of(head["structure"], mesh, _classes(arguments))
        return Program(stored.program(body.splitlines(), mesh), results, structure)  # type: ignore[arg-type]
    except Exception as e:  # whatever a torn or foreign file leads to
        _say(f"{where} cannot be read, so the program is traced again ({type(e).__name__}: {e})".splitlines()[0])
        return None


def _classes(arguments: Any) -> Callable[[str], type | None]:
    """The class of a name that a result may be of: one of the arguments', or of a module that is loaded."""
    found: dict[str, type] = {}

    def note(x: Any) -> bool:
        found.setdefault(stored.named(type(x)), type(x))
        return False

    optree.tree_leaves(arguments, is_leaf=note, namespace=tree.NAMESPACE)

    def class_of(name: str) -> type | None:
        module, _, path = name.partition(":")
        loaded: Any = sys.modules.get(module)
        for part in path.split("."):
            loaded = getattr(loaded, part, None)
        return found.get(name) or (loaded if isinstance(loaded, type) else None)

    return class_of


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as e:
        _say(f"{path} cannot be read, so the program is traced again ({e})")
        return ""


def _write(path: Path, text: str) -> None:
    """Beside the file, then renamed: nobody reads half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".writing-{secrets.token_hex(8)}")
        beside.write_text(text)
        beside.replace(path)
    except OSError as e:
        _say(f"the program of {path.name} is not kept: {e}")


def _say(line: str) -> None:
    print(f"shardlib: {line}", file=sys.stderr)
