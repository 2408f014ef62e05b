"""From a Config to a kernel that can be launched: one build = one kernel = one Config.

A kernel Config is a frozen dataclass whose fields (int, bool, float, str) are the kernel's template arguments, with two
class variables: ``source``, a file under cuda_src, and ``kernel``, the name of its ``extern "C" __global__`` function.
What is compiled is ``struct Config`` (made from the fields), then what ``written_source()`` of the Config returns if it
has that method, and then the source with its includes flattened in.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import math
import os
import posixpath
import re
import struct
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuflash import cache
from cuflash.errors import CompilationError

_SCHEMA = 1  # raise it when the meaning of a stored entry or of the prelude changes
_STATIC_LIMIT = 48 * 1024  # a block may use this much shared memory without opting in


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What the compiler said of one kernel.

    Attributes
    ----------
    registers : int
        Per thread.
    spill_store_bytes, spill_load_bytes, stack_bytes : int
        Spills summed and stack maximised over all functions of the build.
    static_shared_bytes : int
    log : str
        The whole log of NVRTC and ptxas.
    seconds : float
        Compile time when the kernel was built.
    from_cache : bool
        Whether this call found it in the store.
    """

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    log: str
    seconds: float
    from_cache: bool

    def summary(self, arch: str) -> dict[str, Any]:
        """What a user wants to know, for ``explain``."""
        return {
            "arch": arch,
            "registers": self.registers,
            "spill_bytes": self.spill_store_bytes + self.spill_load_bytes,
            "compile_seconds": self.seconds,
            "from_cache": self.from_cache,
        }


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A Config compiled for one architecture: the kernel `name` in the cubin file `path`."""

    config: Any
    arch: str
    name: str
    path: Path
    report: CompileReport


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel loaded on one device.

    Attributes
    ----------
    function : int
        The CUfunction, for ``cuLaunchKernel``; valid while this object lives.
    compiled : CompiledKernel
    owner : cupy.RawKernel
        Keeps the module loaded.
    """

    function: int
    compiled: CompiledKernel
    owner: Any = field(repr=False, compare=False)


def source_root() -> Path:
    """The cuda_src directory: inside the package when installed, beside it in a checkout.

    Raises
    ------
    FileNotFoundError
        When it is in neither place.
    """
    package = Path(__file__).resolve().parent
    for candidate in (package / "cuda_src", package.parent / "cuda_src"):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"there is no cuda_src in or beside {package}; reinstall cuflash")


_INCLUDE = re.compile(r"\s*#\s*include\b\s*(.*)")
_QUOTED = re.compile(r'"([^"]+)"\s*(?://.*|/\*.*)?$')
_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")
_CONDITIONAL = re.compile(r"\s*#\s*(if|ifdef|ifndef|endif)\b")


def flatten(source: str, root: Path | None = None) -> str:
    """One text of a source and all it includes, each file once, with ``#line`` directives relative to `root`.

    Parameters
    ----------
    source : str
        Path below `root`, with forward slashes.
    root : Path, optional
        :func:`source_root` when not given.

    Raises
    ------
    ValueError
        For an include that cannot be followed (``<...>``, a macro, in ``#if``, outside `root`), naming file and line.
    FileNotFoundError
        For a file that is not there, naming the includer.
    """
    lines: list[str] = []
    _flatten_into(lines, set(), source, source_root() if root is None else root, "the Config's source")
    return "\n".join(lines) + "\n"


def _flatten_into(lines: list[str], seen: set[str], name: str, root: Path, includer: str) -> None:
    try:
        text = (root / name).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise FileNotFoundError(f"{includer}: {name!r} is not a file; paths start at cuda_src") from None
    seen.add(name)
    lines.append(f'#line 1 "{name}"')
    depth = 0
    for number, line in enumerate(text.splitlines(), start=1):
        conditional = _CONDITIONAL.match(line)
        if conditional:
            depth += -1 if conditional[1] == "endif" else 1
        include = _INCLUDE.match(line)
        if include is None:
            # Every file is in the text once anyway, and NVRTC warns about the pragma outside a header.
            lines.append("" if _ONCE.match(line) else line)
            continue
        target = _include_target(include[1], f"{name}:{number}", depth)
        if target in seen:
            lines.append("")
        else:
            _flatten_into(lines, seen, target, root, f"{name}:{number}")
            lines.append(f'#line {number + 1} "{name}"')


def _include_target(operand: str, where: str, depth: int) -> str:
    quoted = _QUOTED.match(operand)
    if quoted is None:
        # NVRTC has no header built in; one found on this machine would change the kernel without changing its key.
        raise ValueError(f'{where}: #include {operand.strip()} is not allowed; only #include "path below cuda_src" is')
    target = quoted[1]
    if posixpath.isabs(target) or posixpath.normpath(target) != target or target.startswith(".."):
        raise ValueError(f'{where}: #include "{target}" must be a plain path from cuda_src, without . or ..')
    if depth:
        raise ValueError(f'{where}: #include "{target}" is inside #if; move it out, and use #pragma once as the guard')
    return target


def prelude(config: Any) -> str:
    """The C++ text of ``struct Config``: int, bool and float fields are constants, str fields aliases of tag types.

    A field ``element="bfloat16"`` becomes ``using element = cuflash::bfloat16;`` after a forward declaration.

    Raises
    ------
    TypeError
        When `config` is not a dataclass instance or a field has another type.
    ValueError
        When a value does not fit the C++ type.
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"config={config!r} must be an instance of a frozen dataclass")
    tags: list[str] = []
    members: list[str] = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        where = f"{type(config).__name__}.{item.name}={value!r}"
        if isinstance(value, str):
            if not re.fullmatch(r"[A-Za-z_]\w*", value, re.ASCII):
                raise ValueError(f"{where} must be a C++ identifier: the name of a type in namespace cuflash")
            tags.append(value)
            members.append(f"using {item.name} = cuflash::{value};")
        else:
            members.append(f"static constexpr {_constant(item.name, value, where)};")
    forward = "".join(f"namespace cuflash {{ struct {tag}; }}\n" for tag in dict.fromkeys(tags))
    body = "".join(f"  {member}\n" for member in members)
    return f'#line 1 "Config"\n{forward}struct Config {{\n{body}}};\n'


def _constant(name: str, value: object, where: str) -> str:
    if isinstance(value, bool):
        return f"bool {name} = {'true' if value else 'false'}"
    if isinstance(value, int):
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"{where} does not fit a 32-bit int")
        return f"int {name} = {value}"
    if isinstance(value, float):
        try:
            (rounded,) = struct.unpack("f", struct.pack("f", value))
        except OverflowError:
            rounded = math.inf
        if not math.isfinite(rounded):
            raise ValueError(f"{where} must be finite and within the range of float")
        return f"float {name} = {rounded.hex()}f"
    raise TypeError(f"{where} has type {type(value).__name__}; a Config field must be int, bool, float or str")


# cuda.core replaces itself in sys.modules while it is imported, which breaks when two threads import it at once.
_import_lock = threading.Lock()
_NO_COMPILER = "compiling needs cuda-core and NVRTC ({}); pip install 'cuflash[cuda13]' or 'cuflash[cuda12]'"


@functools.cache
def _nvrtc_release() -> tuple[int, int]:
    try:
        with _import_lock:
            from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the loader's error classes differ between cuda-bindings versions
        raise ImportError(_NO_COMPILER.format(error)) from error
    return major, minor


@functools.cache
def nvrtc_version() -> str:
    """NVRTC's version, with the builds of its installed wheels since NVRTC itself tells major and minor only.

    Raises
    ------
    ImportError
        When cuda.bindings or NVRTC is not installed.
    """
    from importlib import metadata

    major, minor = _nvrtc_release()
    builds = []
    for wheel in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            builds.append(metadata.version(wheel))
        except metadata.PackageNotFoundError:
            continue
    return " ".join([f"{major}.{minor}", *builds])


def _key(unit: str, kernel: str, arch: str, options: dict[str, Any]) -> str:
    parts = [f"cuflash {_SCHEMA}", nvrtc_version(), arch, kernel, *(f"{k}={options[k]}" for k in sorted(options)), unit]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:".encode() + part.encode())
    return digest.hexdigest()


def compile_config(
    config: Any, arch: str, *, store: cache.Store | None = None, root: Path | None = None
) -> CompiledKernel:
    """Compile a Config, or find it in the store; needs no GPU and no driver.

    Parameters
    ----------
    config : frozen dataclass
        See the module's text.
    arch : str
        For example ``"sm_80"`` or ``"sm_90a"``.
    store : Store, optional
        The user's store (see :func:`cuflash.cache.default_root`) when not given.
    root : Path, optional
        Where the sources are; :func:`source_root` when not given.

    Raises
    ------
    CompilationError
        With the compiler's log and the Config.
    ImportError
        When cuda-core or NVRTC is not installed.
    """
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise ValueError(f"arch={arch!r} is not an architecture; pass for example 'sm_80' or 'sm_90a'")
    written: str = config.written_source() if hasattr(config, "written_source") else ""
    unit = prelude(config) + written + flatten(config.source, root)
    options: dict[str, Any] = {"std": "c++17", "ptxas_options": ["-v"]}
    if os.environ.get("CUFLASH_LINEINFO") == "1":
        options["lineinfo"] = True
    if _nvrtc_release() >= (12, 9):  # a hit in NVRTC's own cache comes without the log that the report is read from
        options["no_cache"] = True
    key = _key(unit, config.kernel, arch, options)
    store = cache.default_store() if store is None else store
    with store.lock(key):
        entry = store.lookup(key)
        found = entry is not None
        if entry is None:
            cubin, meta = _compile(config, unit, arch, options)
            entry = store.publish(key, cubin, meta)
    names = [item.name for item in dataclasses.fields(CompileReport) if item.name != "from_cache"]
    report = CompileReport(**{name: entry.meta[name] for name in names}, from_cache=found)
    return CompiledKernel(config, arch, config.kernel, entry.path, report)


def _compile(config: Any, unit: str, arch: str, options: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    try:
        with _import_lock:
            from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise ImportError(_NO_COMPILER.format(error)) from error
    log = io.StringIO()
    started = time.perf_counter()
    try:
        program = Program(unit, "c++", ProgramOptions(name=config.kernel, arch=arch, **options))
        cubin = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core's error classes are private
        raise _compilation_error(config, arch, f"{error}\n{log.getvalue()}") from error
    seconds = time.perf_counter() - started
    text = log.getvalue().replace("\0", "").strip()
    meta = {
        **parse_log(text, config.kernel),
        "log": text,
        "seconds": seconds,
        "arch": arch,
        "kernel": config.kernel,
        "nvrtc": nvrtc_version(),
        "config": repr(config),
    }
    if meta["registers"] == 0:
        found = ", ".join(re.findall(r"entry function '(\w+)'", text)) or "none"
        raise _compilation_error(config, arch, f"{config.source} has no {config.kernel!r}, only: {found}\n{text}")
    return cubin, meta


def _compilation_error(config: Any, arch: str, log: str) -> CompilationError:
    return CompilationError(f"{config!r} did not compile for {arch} with NVRTC {nvrtc_version()}:\n{log.strip()}")


def parse_log(log: str, kernel: str) -> dict[str, int]:
    """The numbers of :class:`CompileReport` in ptxas' verbose log; registers is 0 when `kernel` is not in it."""
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    entry = re.search(rf"Compiling entry function '{re.escape(kernel)}'.*?Used (\d+) registers([^\n]*)", log, re.DOTALL)
    shared = re.search(r"(\d+) bytes smem", entry[2]) if entry else None
    return {
        "registers": int(entry[1]) if entry else 0,
        "spill_store_bytes": sum(int(stores) for _, stores, _ in spills),
        "spill_load_bytes": sum(int(loads) for _, _, loads in spills),
        "stack_bytes": max((int(stack) for stack, _, _ in spills), default=0),
        "static_shared_bytes": int(shared[1]) if shared else 0,
    }


def precompile(
    configs: Iterable[Any],
    arch: str,
    *,
    workers: int | None = None,
    store: cache.Store | None = None,
    root: Path | None = None,
) -> list[CompiledKernel]:
    """Compile many Configs in parallel in `workers` threads (default: one a core); results in the order given.

    Raises
    ------
    CompilationError
        The first Config's that does not compile.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} must be at least 1; use None for one a core")
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        return list(pool.map(lambda config: compile_config(config, arch, store=store, root=root), configs))


_loaded: dict[tuple[Any, str, int], LoadedKernel] = {}
_load_locks = cache.KeyedLocks()
_opted_in: dict[tuple[Any, str, int], int] = {}


def load(config: Any, device_index: int, *, arch: str, dynamic_shared_bytes: int) -> LoadedKernel:
    """Compile a Config and load it on a device; a dictionary hit from the second call on. Never waits for the device.

    `dynamic_shared_bytes` is what the launches will ask for; above 48 KiB (with the static part) the kernel opts in.
    """
    name = (config, arch, device_index)
    if dynamic_shared_bytes <= _opted_in.get(name, -1):
        return _loaded[name]
    with _load_locks(name):
        if name not in _loaded:
            _loaded[name] = _load(config, device_index, arch)
        kernel = _loaded[name]
        if dynamic_shared_bytes > _opted_in.get(name, -1):
            if dynamic_shared_bytes + kernel.compiled.report.static_shared_bytes > _STATIC_LIMIT:
                import cupy

                with cupy.cuda.Device(device_index):
                    kernel.owner.max_dynamic_shared_size_bytes = dynamic_shared_bytes
            _opted_in[name] = dynamic_shared_bytes
        return kernel


def _load(config: Any, device_index: int, arch: str) -> LoadedKernel:
    import cupy

    compiled = compile_config(config, arch)
    with cupy.cuda.Device(device_index):
        function = cupy.RawModule(path=str(compiled.path)).get_function(compiled.name)
        return LoadedKernel(function.kernel.ptr, compiled, function)  # .kernel forces the load
