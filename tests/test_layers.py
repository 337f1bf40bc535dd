"""The house: who may import whom, who may touch private torch, and rules of style that a parser can check."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "shardlib"

# Lowest first. A module imports from the lines above its own, and on its line from what stands before it.
LAYERS = [
    ["errors"],
    ["spec"],  # the grammar; pure strings
    [  # pure data
        "pipeline.actions",
        "pipeline.order",
        "pipeline.draw",
        "pipeline.schedule",
        "pipeline.schedules",
    ],
    ["tree", "parts", "layout"],  # trees of specs; spec x mesh sizes -> slices
    ["watch", "mesh"],  # what ranks tell each other beside collectives; axes and groups
    ["random", "phases", "contract", "heap", "meter"],  # know nothing of shardlib's types
    ["saves", "stream", "chunk", "chunks", "contents", "saving"],  # files of saves
    ["wire", "mapped", "shared", "neighbours", "blocks", "posted", "processes", "switch", "apart"],  # between processes
    ["simulate"],  # all ranks in one process
    ["array", "dtensor"],  # leaves at rest
    ["entries", "checkpoint", "interop.names", "interop.safetensors", "monitor"],
    ["types", "flow"],  # the four types, by data flow
    ["collectives", "broadcast", "ragged"],  # in transpose pairs
    ["insert"],  # pvary where types meet
    ["patterns", "sharding"],  # names and axes against values; reshard and gather inside
    ["mean", "norms", "ops", "dropout", "fused", "vocab", "attention", "debug", "policy", "replay"],
    ["shard_map"],  # the border between arrays and per-device functions
    ["state", "padding", "zero"],  # trees at rest; layouts
    ["autodiff", "remat", "custom"],
    ["optim.options"],
    ["optim.schedules", "optim.base", "optim.layers"],
    ["optim.adamw", "optim.adam", "optim.sgd", "optim.lion", "optim.lamb", "optim.adafactor", "optim.muon"],
    ["optim.transforms", "optim.combine", "optim.wrap", "optim.average"],
    ["loss_scale", "precision"],
    ["graph.lines", "graph.nodes", "graph.forms", "graph.fuse", "graph.record", "graph.trace"],
    ["graph.joint", "scan"],
    [
        "graph.dedupe",
        "graph.shorten",
        "graph.squares",
        "graph.regather",
        "graph.recompute",
        "graph.buckets",
        "graph.hoist",
        "graph.overlap",
        "graph.in_place",
        "graph.join",
        "graph.placed",
        "graph.gloo",
        "graph.finite",
        "passes",
    ],
    ["graph.captured", "graph.program"],
    ["graph.timeline", "graph.text", "graph.memory"],
    ["identity", "meeting"],  # what functions are; what processes run together
    ["graph.stored", "graph.digests", "log", "cache", "signature"],
    [
        "cli.hang",
        "cli.hosts",
        "cli.agent",
        "cli.fleet",
        "cli.run",
        "cli.link",
        "cli.doctor",
        "cli.checkpoint",
    ],
    ["jit", "profile"],
    ["analysis", "accumulate"],
    ["pipeline.sums", "pipeline.stages", "pipeline.arguments", "pipeline.weights", "pipeline.turns", "pipeline.run"],
    ["show"],  # tables for people
    ["step"],
    [  # configs of DeepSpeed
        "interop.deepspeed.table",
        "interop.deepspeed.sections",
        "interop.deepspeed.keys",
        "interop.deepspeed.read",
        "interop.deepspeed.calls",
        "interop.deepspeed.optimizers",
        "interop.deepspeed.config",
        "interop.deepspeed.explain",
    ],
    ["cli.config", "cli.command", "__main__"],
    [
        "testing.forks",
        "testing.server",
        "testing.launch",
        "testing.compare",
        "testing.functions",
        "testing.steps",
        "testing.optimizers",
        "testing.storages",
    ],
]
ORDER = [name for layer in LAYERS for name in layer]

# Modules that may use what torch does not promise: names with a leading underscore. Each import says why.
PRIVATE = {
    "array": "wrapper tensors",
    "dtensor": "strided shards",
    "tree": "the pytree registry of torch.func",
    "watch": "the store of the default process group",
    "mesh": "the registry of process groups by name",
    "wire": "functional collectives",
    "simulate": "dispatch modes",
    "types": "functorch's wrappers",
    "flow": "dispatch modes",
    "policy": "dispatch modes",
    "collectives": "functorch's levels",
    "insert": "function modes",
    "fused": "functorch's levels",
    "autodiff": "functorch's levels",
    "remat": "functorch's levels",
    "replay": "storages",
    "custom": "functorch's levels",
    "shard_map": "fake tensors",
    "state": "fake tensors",
    "entries": "fake tensors",
    "debug": "functorch's wrappers, fake tensors",
    "graph.lines": "autograd's numbers of operations",
    "graph.nodes": "fake tensors",
    "graph.record": "dispatch modes, fake tensors, make_fx",
    "graph.trace": "fake tensors, make_fx",
    "scan": "functorch's levels",
    "graph.program": "Inductor, ops",
    "graph.in_place": "which ops have kernels",
    "graph.stored": "fake tensors, ops",
    "identity": "ops",
    "meeting": "the store of the default process group",
}


def modules() -> list[str]:
    """All but the packages' `__init__` and the kernels, which see tensors only."""
    found = (p.relative_to(ROOT).with_suffix("") for p in ROOT.rglob("*.py"))
    return sorted(".".join(p.parts) for p in found if p.name != "__init__" and p.parts[0] != "kernels")


def path(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports(file: Path) -> Iterator[tuple[str, ast.stmt]]:
    """The full names of all that a file imports, inside functions too."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            yield from ((a.name, node) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{a.name}", node) for a in node.names)


def imported(module: str) -> set[str]:
    """The modules of shardlib that one imports; kernels are below all."""
    known = set(modules())
    names = [n.removeprefix("shardlib.") for n, _ in imports(path(module)) if n.startswith("shardlib.")]
    return {n if n in known else n.rpartition(".")[0] for n in names} - {"", "kernels"}


def test_every_module_has_its_place():
    assert len(set(ORDER)) == len(ORDER)
    assert modules() == sorted(ORDER), "write new modules into LAYERS, lowest first"


@pytest.mark.parametrize("module", [m for m in ORDER if path(m).exists()])
def test_imports_go_down(module):
    below = ORDER[: ORDER.index(module)]
    assert not [m for m in imported(module) if m not in below], f"{module} may import {below}"


def dotted(node: ast.AST) -> str:
    """`torch._C.x` for such an expression."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def private(name: str) -> bool:
    parts = name.split(".")
    return parts[0] in ("torch", "dist") and any(p.startswith("_") and not p.endswith("__") for p in parts)


@pytest.mark.parametrize("module", modules())
def test_private_torch_is_used_where_said_and_explained(module):
    lines = path(module).read_text().splitlines()
    found = [(name, node) for name, node in imports(path(module)) if private(name)]
    expressions = (n for n in ast.walk(parsed(path(module))) if isinstance(n, ast.Attribute))
    used = [dotted(n) for n in expressions if private(dotted(n)) and not dotted(n).startswith("torch.ops.")]
    assert module in PRIVATE or not (found or used), f"{module} uses {[n for n, _ in found] + used}"
    bare = [name for name, n in found if not any("#" in s for s in lines[n.lineno - 1 : n.end_lineno])]
    assert not bare, f"say in a comment why {module} imports {bare}"


def test_packages_only_re_export():
    for file in ROOT.rglob("__init__.py"):
        doc, *rest = parsed(file).body
        assert isinstance(doc, ast.Expr), f"{file}: a docstring first"
        for node in rest:
            assert isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardlib"), (
                f"{file}:{node.lineno}"
            )
            assert all(a.asname == a.name for a in node.names), f"{file}:{node.lineno}: from shardlib.x import y as y"


def test_modules_are_short_and_have_names_of_their_own():
    for module in modules():
        lines = len(path(module).read_text().splitlines())
        assert lines <= 400, f"{module} has {lines} lines"
        assert not {"utils", "util", "common", "helpers", "misc"} & set(module.split("."))


def test_the_core_is_small():
    core = "spec tree mesh layout types collectives mean ops sharding autodiff zero step".split()
    assert sum(len(path(m).read_text().splitlines()) for m in core) < 3500


def test_kernels_are_no_package():
    assert (ROOT / "kernels").is_symlink() and not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("module", modules())
def test_rules_of_style(module):
    for node in ast.walk(parsed(path(module))):
        where = f"{module}:{getattr(node, 'lineno', '')}"
        if isinstance(node, ast.Attribute):
            assert "hook" not in node.attr or not node.attr.startswith("register_"), f"{where}: no hooks"
            may = module in ("mesh", "heap", "neighbours", "testing.server")
            reads = may or dotted(node) not in ("os.environ", "os.getenv")
            assert reads or module.startswith("cli."), (
                f"{where}: only the mesh, the heap, neighbours, the server and the launcher read the environment"
            )
        for target in node.targets if isinstance(node, ast.Assign) else ():
            assert not dotted(target).startswith("torch."), f"{where}: no assignment into torch"
