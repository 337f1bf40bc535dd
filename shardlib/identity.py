"""What a function is: a digest of its code and of all that it reaches, the same in every process, or the reason why
there is none.

Code is bytecode, with its lines; what it reaches are closures, defaults, attributes, globals, methods of classes. The
standard library and the packages of `KNOWN` count by name and version, shardlib by the digest of its sources. Nothing
is guessed: a tensor, a value held in C, what reads the clock or the environment has no identity.
"""

import builtins
import dataclasses
import dis
import enum
import functools
import hashlib
import importlib
import inspect
import os
import re
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlib.mesh import Mesh
from shardlib.parts import Memo

KNOWN = ("shardlib", "torch", "numpy", "optree", "einops", "triton")  # by name and version
_LIBRARY = sysconfig.get_paths()["stdlib"]
_OURS = str(Path(__file__).parent)
# what no key can know: the clock, the process, the surroundings
_UNKNOWABLE = {"os", "posix", "nt", "time", "random", "_random", "datetime", "secrets", "uuid", "socket", "subprocess"}
_UNKNOWABLE |= {"numpy.random", "platform", "tempfile", "sys"}
_OPEN = (eval, exec, open, input, globals, locals, vars, __import__, id)
_RANK = {"get_rank", "get_node_local_rank"}
_SKIPPED = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__annotate__", "__annotate_func__"}
_SKIPPED |= {"__annotations_cache__", "__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl"}
_SKIPPED |= {"__parameters__", "__orig_bases__", "__match_args__", "__dataclass_params__", "__slotnames__"}
_SKIPPED |= {"_autograd_function_id"}
_IN_PYTHON = 1 << 9  # the flag of classes that are no part of C's data
_VALUES = (bool, int, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range)
_TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class Unknown(Exception):
    """No digest says what a function is; why, and how to mend it."""


def identity(x: Any, what: str = "it") -> str:
    """The digest of a value, a function and all that it reaches among them. Raises `Unknown`."""
    walk = _Walk()
    walk.value(x, what)
    return walk.digest.hexdigest()


@functools.cache
def sources() -> str:
    """The digest of shardlib's own sources."""
    found = hashlib.sha256()
    folders = os.walk(_OURS, followlinks=True)  # the kernels are behind a link
    for file in sorted(Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".py")):
        found.update(f"{file.relative_to(_OURS)}\0".encode() + file.read_bytes() + b"\0")
    return found.hexdigest()


class _Walk:
    """Puts tokens into a digest, in the order in which things are met; what was met before is a number."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.met: dict[int, tuple[int, Any]] = {}  # by id: its number, and itself, which keeps the id

    def put(self, *tokens: object) -> None:
        self.digest.update("".join(f"{len(t)}:{t}" for t in map(str, tokens)).encode(errors="surrogatepass"))

    def value(self, x: Any, at: str) -> None:
        """`x`, which is called `at` in messages."""
        if isinstance(x, enum.Enum):
            self.put("enum", x.name)
            return self.value((x.value, type(x)), at)
        if type(x) in _VALUES or isinstance(x, _TORCH_VALUES):
            return self.put(type(x).__name__, repr(x))
        if type(x) is float:
            return self.put("float", x.hex())
        if type(x) in (tuple, torch.Size):  # equal ones may be one object or several
            self.put(type(x).__name__, len(x))
            for i, y in enumerate(x):
                self.value(y, f"{at}[{i}]")
            return None
        if type(x) in (set, frozenset):
            return self.put(type(x).__name__, *sorted(identity(y, f"an element of {at}") for y in x))
        if id(x) in self.met:
            return self.put("met", self.met[id(x)][0])
        self.met[id(x)] = len(self.met), x
        if isinstance(x, Memo):  # what a function keeps of earlier calls
            return self.put("memo")
        if isinstance(x, Tensor):
            raise Unknown(f"{at} is a tensor, whose values no key holds: pass it as an argument")
        if isinstance(x, types.ModuleType):
            return self.module(x, at)
        if isinstance(x, (types.FunctionType, types.CodeType)):
            return self.function(x, at) if isinstance(x, types.FunctionType) else self.code(x, at)
        if isinstance(x, type):
            return self.class_(x, at)
        if isinstance(x, Mesh):
            if not x.simulate and x.total > 1:
                raise Unknown(f"{at} is a mesh, which holds this process's rank: leave mesh= out, or use sl.axis_index")
            return self.put("mesh", x.name, x.groups, x.device.type)
        if type(x) in (list, dict, types.MappingProxyType):
            self.put(type(x).__name__, len(x))
            items = x.items() if isinstance(x, (dict, types.MappingProxyType)) else enumerate(x)
            for k, y in items:
                self.value(k, f"a key of {at}")
                self.value(y, f"{at}[{k!r}]" if type(k) in (int, str) else f"an item of {at}")
            return None
        return self.instance(x, at)

    def instance(self, x: Any, at: str) -> None:
        """Any other object: its class and state, where that is all that there is."""
        if isinstance(x, functools._lru_cache_wrapper):
            return self.value(x.__wrapped__, at)
        if type(x) is functools.partial:
            self.put("partial")
            return self.value((x.func, x.args, x.keywords), at)
        if isinstance(x, types.MethodType):
            self.put("method")
            return self.value((x.__func__, x.__self__), at)
        if isinstance(x, (staticmethod, classmethod)):
            self.put(type(x).__name__)
            return self.value(x.__func__, at)
        if isinstance(x, functools.cached_property):
            return self.value(x.func, at)
        if type(x) is property:
            self.put("property")
            return self.value((x.fget, x.fset, x.fdel), at)
        if isinstance(x, dataclasses.Field):
            return self.value((x.name, x.default, x.default_factory, x.init, x.metadata), at)
        if x is dataclasses.MISSING:
            return self.put("missing")
        if isinstance(x, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            space = (x._schema.name if isinstance(x, torch._ops.OpOverload) else x._qualified_op_name).split("::")[0]
            if space not in ("aten", "prims", "_c10d_functional", "shardlib"):
                raise Unknown(f"{at} is the op {x}, whose code no key can know")
            return self.put("op", str(x))
        if isinstance(x, (types.MemberDescriptorType, types.GetSetDescriptorType)):
            return self.put("slot", x.__name__)
        if isinstance(x, _C_FUNCTIONS):
            return self.c_function(x, at)
        if type(x) is types.SimpleNamespace:
            return self.value(vars(x), at)
        kind = type(x)
        plain = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
        try:
            state: Any = x.__reduce_ex__(2) if plain and kind.__getstate__ is object.__getstate__ else None
        except TypeError:
            state = None
        if state is None:
            named = f"{kind.__module__}.{kind.__qualname__}"
            raise Unknown(f"{at} is a {named}, whose state no key can hold: pass what it computes with as an argument")
        self.put("object")
        self.value(kind, at)
        parts = state[2] if isinstance(state[2], tuple) else (state[2],)  # attributes, and those in slots
        found = {k: y for part in parts if part for k, y in part.items()}
        for name in sorted(found):
            if not isinstance(inspect.getattr_static(kind, name, None), functools.cached_property):
                self.put(name)
                self.value(found[name], f"{at}.{name}")
        for more in (state[1][1:], *state[3:]):  # what subclasses of tuple, list and dict hold
            self.value(None if more is None else tuple(more), at)

    # ---- functions

    def function(self, f: types.FunctionType, at: str) -> None:
        origin = _origin(f.__code__.co_filename, f.__module__)
        if origin is not None and _known(_root(f)) and _reachable(f):
            return self.named(f.__module__, f.__qualname__, at)
        self.put("function", f.__qualname__, origin)
        self.code(f.__code__, at)
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            self.put(name)
            try:
                held = cell.cell_contents
            except ValueError:
                raise Unknown(f"`{name}` in {at} is not there yet") from None
            self.value(held, f"`{name}` in {at}")
        self.value((f.__defaults__, f.__kwdefaults__), f"a default of {at}")
        self.value(vars(f), f"an attribute of {at}")
        for path, y in _globals(f, at) if origin is None else ():
            self.put(path)
            self.value(y, f"`{path}` in {at}")

    def code(self, code: types.CodeType, at: str) -> None:
        """Bytecode, its constants, names and lines; not the file."""
        self.put("code", code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self.put(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_name)
        self.put(code.co_firstlineno, code.co_linetable.hex(), code.co_exceptiontable.hex())
        for constant in code.co_consts:
            self.value(constant, f"a constant of {at}")

    def c_function(self, x: Any, at: str) -> None:
        if any(x is f for f in _OPEN):
            raise Unknown(_unknown(at, "", ""))
        owner, home = getattr(x, "__self__", None), getattr(x, "__module__", None)
        if isinstance(owner, types.ModuleType):
            home = owner.__name__
        elif not isinstance(home, str):
            if owner is not None and not isinstance(owner, type):
                self.put("bound", x.__name__)
                return self.value(owner, f"the owner of {at}")
            home = getattr(getattr(x, "__objclass__", owner), "__module__", None)
        if not isinstance(home, str):
            raise Unknown(f"{at} is the C function `{x.__name__}`, which names no module: call it in a def of yours")
        return self.named(home, getattr(x, "__qualname__", x.__name__), at)

    def named(self, module: str, name: str, at: str) -> None:
        """What a module that is known has under a name."""
        root = module.split(".")[0]
        if _unknowable(module, name):
            raise Unknown(_unknown(at, f" (`{module}.{name}`)", name))
        if not _known(root):
            raise Unknown(f"{at} is `{module}.{name}`, whose code no key can know: pass what it gives as an argument")
        self.put("named", module, name, getattr(sys.modules.get(root), "__version__", ""))

    def module(self, x: types.ModuleType, at: str) -> None:
        if not _known(x.__name__.split(".")[0]):
            raise Unknown(f"{at} is the module {x.__name__}, used as a value: name the function of it that is meant")
        self.named(x.__name__, "", at)

    # ---- classes

    def class_(self, cls: type, at: str) -> None:
        if _known(_root(cls)) and (_reachable(cls) or not cls.__flags__ & _IN_PYTHON):
            return self.put("class", cls.__module__, cls.__qualname__)
        self.put("class", cls.__qualname__)
        self.value((type(cls), *cls.__bases__), f"a base of {cls.__name__}")
        generated = dataclasses.is_dataclass(cls)  # from its fields, which are among the items
        for name, y in vars(cls).items():
            code = getattr(inspect.unwrap(y) if isinstance(y, types.FunctionType) else None, "__code__", None)
            if name in _SKIPPED or (generated and code is not None and code.co_filename == "<string>"):
                continue
            self.put(name)
            self.value(y, f"`{cls.__name__}.{name}`")
        return None


_C_FUNCTIONS = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)


def _known(root: str) -> bool:
    """Whether a package's version says what its code is; not where a module of the user's has a library's name."""
    if root in KNOWN:
        return True
    file = getattr(sys.modules.get(root), "__file__", None) or _LIBRARY
    return root in sys.stdlib_module_names and root != "__main__" and _in_library(file)


def _in_library(file: str) -> bool:
    return file.startswith(("<frozen ", _LIBRARY)) and not re.search(r"\b(site|dist)-packages\b", file)


def _origin(file: str, module: str | None) -> str | None:
    """Where code lies whose sources need not be read: in shardlib, the standard library or a known package."""
    root = (module or "").split(".")[0]
    if file.startswith(_OURS):
        return file.removeprefix(_OURS)
    home = getattr(sys.modules.get(root), "__file__", None) or ""
    if root in KNOWN and file.startswith(str(Path(home).parent)):
        return f"{root} {getattr(sys.modules[root], '__version__', '')} {file.removeprefix(str(Path(home).parent))}"
    return file.removeprefix(_LIBRARY) if _in_library(file) else None


def _root(x: Any) -> str:
    return (x.__module__ or "").split(".")[0]


def _reachable(x: Any) -> bool:
    """Whether its module has a function or class under its name: then it is the module's own."""
    found: Any = sys.modules.get(x.__module__)
    for name in x.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is x


_MISSING = object()


def _globals(f: types.FunctionType, at: str) -> Iterator[tuple[str, Any]]:
    """The globals that a function reads, and those defined in it; of a module the attribute that is read of it."""
    for code in _codes(f.__code__):
        steps = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG", "PUSH_NULL")]
        for i, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":
                level, names = steps[i - 2].argval, steps[i - 1].argval
                yield from _imported("." * level + str(step.argval), names, f.__globals__.get("__package__"), at)
            if step.opname not in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                continue
            path = str(step.argval)
            held = f.__globals__.get(path, getattr(builtins, path, _MISSING))
            while isinstance(held, types.ModuleType) and steps[i + 1].opname in ("LOAD_ATTR", "LOAD_METHOD"):
                i += 1
                name = str(steps[i].argval)
                held, path = _attribute(held, name, f"`{path}` in {at}"), f"{path}.{name}"
            if held is _MISSING:
                raise Unknown(f"{at} uses `{path}`, which is not defined yet")
            yield path, held


def _attribute(owner: types.ModuleType, name: str, at: str) -> Any:
    """What a module has under a name; the name itself, where the module is known and that holds no Python."""
    held, home = getattr(owner, name, _MISSING), owner.__name__
    if _unknowable(home, name):
        raise Unknown(_unknown(f"`{home}.{name}`", f" ({at})", name))
    ops = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    walked = (types.ModuleType, types.FunctionType, type, *ops, *_VALUES, float)
    if held is _MISSING or isinstance(held, walked) or not (_known(home.split(".")[0]) and _known(_root(type(held)))):
        return held
    return f"{home}.{name}"


def _unknowable(module: str, name: str) -> bool:
    root = module.split(".")[0]
    return module in _UNKNOWABLE or root in _UNKNOWABLE or (root == "torch" and name in _RANK)


def _unknown(what: str, at: str, name: str) -> str:
    mend = "sl.axis_index gives the rank as a value" if name in _RANK else "pass what it gives as an argument"
    return f"what {what}{at} gives no key can know: {mend}"


def _imported(name: str, names: Any, package: str | None, at: str) -> Iterator[tuple[str, Any]]:
    """What an import inside a function brings in."""
    try:
        module = importlib.import_module(name, package)
    except ImportError as e:
        raise Unknown(f"{at} imports {name}: {e}") from None
    if _known(module.__name__.split(".")[0]):
        yield module.__name__, module
    elif not names:
        raise Unknown(f"{at} imports {name} in its body: import it at the top of the file, or from it what is used")
    else:
        yield from ((f"{name}.{n}", getattr(module, n, None)) for n in names)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
