"""From Config to cubin: flattening, the prelude, the store's key, errors, concurrency, loading; no GPU needed."""

from __future__ import annotations

import dataclasses
import importlib.util
import multiprocessing
import os
import re
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cuflash import cache, device, jit
from cuflash.errors import CompilationError

HAS_NVRTC = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.core") is not None
needs_nvrtc = pytest.mark.skipif(not HAS_NVRTC, reason="cuda-core is not installed, so NVRTC cannot be called")

MAIN = """\
#include "lib/types.cuh"
#include "lib/math.cuh"
extern "C" __global__ void __launch_bounds__(128) toy(float* x) {
  __shared__ float tile[Config::tile];
  tile[threadIdx.x % Config::tile] = x[threadIdx.x];
  __syncthreads();
  float value = twice(tile[Config::tile - 1 - threadIdx.x % Config::tile]) * Config::factor;
  x[threadIdx.x] = Config::negate ? -value : value + Config::element::width;
}
"""
TYPES = "#pragma once\nnamespace cuflash { struct bfloat16 { static constexpr int width = 2; }; }\n"
MATH = '#pragma once\n#include "lib/types.cuh"\n__device__ inline float twice(float x) { return 2 * x; }\n'


@dataclass(frozen=True)
class Toy:
    """A Config with a field of each type."""

    source: ClassVar[str] = "toy/toy.cu"
    kernel: ClassVar[str] = "toy"
    tile: int = 64
    negate: bool = False
    factor: float = 0.1
    element: str = "bfloat16"


class Missing(Toy):
    """The same source, but a kernel that is not in it."""

    kernel: ClassVar[str] = "no_such_kernel"


def write_sources(root: Path) -> Path:
    """The toy kernel and its two headers below `root`."""
    for name, text in {"toy/toy.cu": MAIN, "lib/types.cuh": TYPES, "lib/math.cuh": MATH}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "src")


@pytest.fixture
def store(tmp_path: Path) -> cache.Store:
    return cache.Store(tmp_path / "cache")


def count_compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the Config of each real compilation from now on."""
    calls: list[str] = []
    compile_ = jit._compile

    def counted(config: Any, *rest: Any) -> Any:
        calls.append(repr(config))
        return compile_(config, *rest)

    monkeypatch.setattr(jit, "_compile", counted)
    return calls


# Flattening


def test_flatten_takes_each_file_once_and_keeps_line_numbers(root: Path) -> None:
    text = jit.flatten("toy/toy.cu", root)
    assert text.count("struct bfloat16") == 1 and text.count("float twice(float x)") == 1
    assert "#include" not in text and "#pragma once" not in text and str(root) not in text
    # Independent check: walk the text as a compiler would, and compare each line with the file it claims to be.
    name, number, compared = "", 0, 0
    for line in text.splitlines():
        directive = re.fullmatch(r'#line (\d+) "([^"]+)"', line)
        if directive:
            name, number = directive[2], int(directive[1])
            continue
        if line:
            assert (root / name).read_text().splitlines()[number - 1] == line
            compared += 1
        number += 1
    assert compared == 7 + 1 + 1  # the lines of toy.cu, types.cuh and math.cuh that are no directive


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("#include <cuda_fp16.h>", ValueError, r"toy/bad\.cu:2: #include <cuda_fp16\.h> is not allowed"),
        ("#  include HEADER", ValueError, r"toy/bad\.cu:2: #include HEADER is not allowed"),
        ('#include "lib/none.cuh"', FileNotFoundError, r"toy/bad\.cu:2: 'lib/none\.cuh' is not a file"),
        ('#include "lib"', FileNotFoundError, r"toy/bad\.cu:2: 'lib' is not a file"),
        ('#include "../lib/math.cuh"', ValueError, r"toy/bad\.cu:2: .* plain path"),
        ('#include "/etc/passwd"', ValueError, r"toy/bad\.cu:2: .* plain path"),
        ('#if 1\n#include "lib/math.cuh"\n#endif', ValueError, r"toy/bad\.cu:3: .* inside #if"),
    ],
)
def test_an_include_that_cannot_be_followed_names_its_place(
    root: Path, line: str, error: type[Exception], message: str
) -> None:
    (root / "toy/bad.cu").write_text(f"// a comment\n{line}\n")
    with pytest.raises(error, match=message):
        jit.flatten("toy/bad.cu", root)


def test_a_missing_source_is_named(root: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the Config's source: 'toy/gone\.cu'"):
        jit.flatten("toy/gone.cu", root)


def test_includes_in_a_cycle_and_after_endif_are_followed(root: Path) -> None:
    (root / "lib/a.cuh").write_text('#if 1\n#define A\n#endif\n#include "lib/b.cuh" // why\nint a;\n')
    (root / "lib/b.cuh").write_text('#include "lib/a.cuh"\nint b;\n')
    lines = jit.flatten("lib/a.cuh", root).splitlines()
    assert [line for line in lines if line.startswith("int")] == ["int b;", "int a;"]


def test_the_sources_of_the_package_are_found() -> None:
    assert jit.source_root().name == "cuda_src"
    assert list(jit.source_root().rglob("*.cu*"))


# Prelude


def test_prelude_of_each_field_type() -> None:
    lines = jit.prelude(Toy(tile=-3, negate=True, factor=0.1)).splitlines()
    assert lines[1:3] == ["namespace cuflash { struct bfloat16; }", "struct Config {"]
    assert lines[3] == "  static constexpr int tile = -3;"
    assert lines[4] == "  static constexpr bool negate = true;"
    assert lines[6:] == ["  using element = cuflash::bfloat16;", "};"]
    literal = re.fullmatch(r"  static constexpr float factor = (\S+)f;", lines[5])
    assert literal and float.fromhex(literal[1]) == struct.unpack("f", struct.pack("f", 0.1))[0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tile": 2**31}, ValueError, r"Toy\.tile=2147483648 does not fit"),
        ({"tile": None}, TypeError, r"Toy\.tile=None has type NoneType"),
        ({"tile": (1, 2)}, TypeError, r"Toy\.tile=\(1, 2\) has type tuple"),
        ({"factor": float("nan")}, ValueError, r"Toy\.factor=nan must be finite"),
        ({"factor": 1e39}, ValueError, r"Toy\.factor=1e\+39 must be finite"),
        ({"element": "bf16; int x"}, ValueError, r"Toy\.element='bf16; int x' must be a C\+\+ identifier"),
    ],
)
def test_prelude_refuses_what_it_cannot_write(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        jit.prelude(dataclasses.replace(Toy(), **change))


def test_prelude_wants_a_dataclass_instance() -> None:
    for bad in (Toy, 3):
        with pytest.raises(TypeError, match="instance of a frozen dataclass"):
            jit.prelude(bad)


# Compiling


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
def test_compile_reports_and_is_found_again(root: Path, store: cache.Store, arch: str) -> None:
    first = jit.compile_config(Toy(), arch, store=store, root=root)
    assert first.path.read_bytes()[:4] == b"\x7fELF"
    assert (first.name, first.arch, first.config) == ("toy", arch, Toy())
    report = first.report
    assert report.static_shared_bytes == 64 * 4 and 0 < report.registers <= 255
    assert (report.spill_store_bytes, report.spill_load_bytes, report.stack_bytes) == (0, 0, 0)
    assert "Compiling entry function 'toy'" in report.log and not report.from_cache
    again = jit.compile_config(Toy(), arch, store=cache.Store(store.root), root=root)
    assert again == dataclasses.replace(first, report=dataclasses.replace(report, from_cache=True))


@needs_nvrtc
def test_the_key_follows_everything_that_matters(
    root: Path, store: cache.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def path(config: Any = Toy(), arch: str = "sm_80") -> Path:
        return jit.compile_config(config, arch, store=store, root=root).path

    base = path()
    paths = [base, path(Toy(tile=32)), path(arch="sm_86")]
    monkeypatch.setenv("CUFLASH_LINEINFO", "1")
    paths.append(path())
    monkeypatch.delenv("CUFLASH_LINEINFO")
    header = root / "lib/math.cuh"
    header.write_text(MATH.replace("2 * x", "x + x"))
    paths.append(path())
    header.write_text(MATH)
    monkeypatch.setattr(jit, "nvrtc_version", lambda: "99.9")
    paths.append(path())
    monkeypatch.undo()
    assert len(set(paths)) == len(paths)
    assert path() == base
    elsewhere = jit.compile_config(Toy(), "sm_80", store=store, root=write_sources(tmp_path / "elsewhere"))
    assert elsewhere.path == base, "the place of the checkout must not be in the key"


@needs_nvrtc
@pytest.mark.parametrize("size", [0, 100])
def test_a_damaged_cubin_is_rebuilt(root: Path, store: cache.Store, size: int) -> None:
    path = jit.compile_config(Toy(), "sm_80", store=store, root=root).path
    good = path.read_bytes()
    os.truncate(path, size)
    with pytest.warns(RuntimeWarning, match="corrupt"):
        again = jit.compile_config(Toy(), "sm_80", store=store, root=root)
    assert not again.report.from_cache and again.path == path and path.read_bytes() == good


@needs_nvrtc
def test_denormals_are_kept(root: Path, store: cache.Store) -> None:
    """Float arithmetic carries .FTZ in SASS only when denormals are flushed."""
    disassemble = _check_kernels().disassemble
    try:
        sass = disassemble(jit.compile_config(Toy(), "sm_80", store=store, root=root).path)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert re.search(r"\bF(MUL|ADD|FMA) ", sass)
    assert ".FTZ" not in sass


@needs_nvrtc
def test_a_compile_error_shows_log_and_config(root: Path, store: cache.Store) -> None:
    (root / "lib/math.cuh").write_text(MATH.replace("2 * x", "2 * y"))
    with pytest.raises(CompilationError) as caught:
        jit.compile_config(Toy(tile=48), "sm_80", store=store, root=root)
    message = str(caught.value)
    assert "Toy(tile=48, negate=False, factor=0.1, element='bfloat16') did not compile for sm_80" in message
    assert 'lib/math.cuh(3): error: identifier "y" is undefined' in message
    assert str(root) not in message


@needs_nvrtc
def test_a_kernel_that_is_not_in_the_source(root: Path, store: cache.Store) -> None:
    with pytest.raises(CompilationError, match=r"toy/toy\.cu has no 'no_such_kernel', only: toy"):
        jit.compile_config(Missing(), "sm_80", store=store, root=root)


def test_a_missing_compiler_names_the_extra(root: Path, store: cache.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    jit._nvrtc_release.cache_clear()
    with pytest.raises(ImportError, match=r"pip install 'cuflash\[cuda13\]'"):
        jit.compile_config(Toy(), "sm_80", store=store, root=root)
    monkeypatch.setattr(jit, "_nvrtc_release", lambda: (13, 0))
    monkeypatch.setattr(jit, "nvrtc_version", lambda: "13.0")
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(ImportError, match=r"pip install 'cuflash\[cuda13\]'"):
        jit.compile_config(Toy(), "sm_80", store=store, root=root)


@needs_nvrtc
def test_a_second_store_has_the_report_too(root: Path, tmp_path: Path) -> None:
    """NVRTC 12.9 and later keep a cache of their own where there is a driver; a hit in it would come without a log."""
    reports = [
        jit.compile_config(Toy(), "sm_80", store=cache.Store(tmp_path / name), root=root).report for name in "ab"
    ]
    assert not any(report.from_cache for report in reports)
    assert reports[0].registers == reports[1].registers > 0


def test_a_bad_architecture(root: Path) -> None:
    with pytest.raises(ValueError, match="arch='90'"):
        jit.compile_config(Toy(), "90", root=root)


@needs_nvrtc
def test_spills_and_stack_are_reported(root: Path, store: cache.Store) -> None:
    (root / "toy/toy.cu").write_text(
        '#include "lib/types.cuh"\n'
        'extern "C" __global__ void __launch_bounds__(1024, 2) toy(float* x) {\n'
        "  float a[64];\n"
        "  for (int i = 0; i < 64; ++i) a[i] = x[i * 1024 + threadIdx.x];\n"
        "  __syncthreads();\n"
        "  float s = 0;\n"
        "  for (int i = 0; i < 64; ++i) for (int j = 0; j < 64; ++j) s = s * a[i] + a[j];\n"
        "  for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = s * a[i];\n"
        "}\n"
    )
    report = jit.compile_config(Toy(), "sm_80", store=store, root=root).report
    assert report.spill_store_bytes > 0 and report.spill_load_bytes > 0 and report.stack_bytes > 0


def test_parse_log_takes_the_numbers_of_the_kernel_asked_for() -> None:
    log = """ptxas info    : Compiling entry function 'other' for 'sm_80'
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 256 bytes smem, 368 bytes cmem[0]
ptxas info    : Compiling entry function 'mine' for 'sm_80'
ptxas         .     16 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads
ptxas info    : Used 77 registers, used 1 barriers, 368 bytes cmem[0]
"""
    expected = {"spill_store_bytes": 5, "spill_load_bytes": 14, "stack_bytes": 16}
    assert jit.parse_log(log, "mine") == {"registers": 77, "static_shared_bytes": 0, **expected}
    assert jit.parse_log(log, "other") == {"registers": 10, "static_shared_bytes": 256, **expected}
    assert jit.parse_log(log, "absent")["registers"] == 0


@needs_nvrtc
def test_precompile_keeps_the_order(root: Path, store: cache.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_compiles(monkeypatch)
    configs = [Toy(tile=tile) for tile in (64, 32, 64, 16)]
    kernels = jit.precompile(configs, "sm_80", workers=4, store=store, root=root)
    assert [kernel.config for kernel in kernels] == configs
    assert [kernel.report.static_shared_bytes for kernel in kernels] == [256, 128, 256, 64]
    assert len(calls) == 3
    with pytest.raises(ValueError, match="workers=0"):
        jit.precompile(configs, "sm_80", workers=0)


# Concurrency


def run_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work` in `count` threads that start together; raise the first failure."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(count)

    def body(index: int) -> None:
        barrier.wait()
        try:
            work(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@needs_nvrtc
def test_eight_threads_compile_once(root: Path, store: cache.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_compiles(monkeypatch)
    kernels: list[jit.CompiledKernel] = []
    run_threads(8, lambda _: kernels.append(jit.compile_config(Toy(), "sm_80", store=store, root=root)))
    assert len(calls) == 1
    assert sorted(kernel.report.from_cache for kernel in kernels) == [False] + [True] * 7
    assert len({kernel.path for kernel in kernels}) == 1


def cold_process(root: Path, directory: Path, barrier: Any, results: Any) -> None:
    """Eight threads compile three Configs, each starting at another one; runs in a spawned process."""
    try:
        patch = pytest.MonkeyPatch()
        calls = count_compiles(patch)
        store = cache.Store(directory)
        seen: list[tuple[int, str, bytes]] = []
        barrier.wait()

        def work(index: int) -> None:
            for step in range(3):
                tile = 16 << (index + step) % 3
                path = jit.compile_config(Toy(tile=tile), "sm_80", store=store, root=root).path
                seen.append((tile, str(path), path.read_bytes()))

        run_threads(8, work)
        results.put((sorted(calls), seen))
    except BaseException as error:
        results.put(error)


@needs_nvrtc
def test_two_processes_of_eight_threads_on_a_cold_cache(root: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (root, tmp_path / "cold", barrier, results)
    processes = [context.Process(target=cold_process, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    everything = []
    for outcome in outcomes:
        assert not isinstance(outcome, BaseException), outcome
        calls, seen = outcome
        assert len(calls) == len(set(calls)) <= 3, "a process compiled a Config twice"
        assert len(seen) == 24
        everything += seen
    assert len(set(everything)) == 3, "two readers saw different kernels under one key"
    assert list((tmp_path / "cold" / "tmp").glob("*-*")) == []


# Loading, with a stand-in for CuPy that records what it is asked


class FakeCuPy:
    """The parts of CuPy that load() uses."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, str, str]] = []
        self.opt_ins: list[tuple[int, int]] = []
        self.current = threading.local()

    def module(self) -> types.ModuleType:
        fake = self

        class Device:
            def __init__(self, index: int) -> None:
                self.index = index

            def __enter__(self) -> None:
                fake.current.index = self.index

            def __exit__(self, *_: object) -> None:
                del fake.current.index

        class Function:
            def __init__(self, path: str, name: str) -> None:
                self.path, self.name = path, name

            @property
            def kernel(self) -> types.SimpleNamespace:
                fake.loads.append((fake.current.index, self.path, self.name))
                return types.SimpleNamespace(ptr=1000 + len(fake.loads))

            def __setattr__(self, name: str, value: Any) -> None:
                if name == "max_dynamic_shared_size_bytes":
                    fake.opt_ins.append((fake.current.index, value))
                object.__setattr__(self, name, value)

        class RawModule:
            def __init__(self, *, path: str) -> None:
                self.path = path

            def get_function(self, name: str) -> Function:
                return Function(self.path, name)

        module = types.ModuleType("cupy")
        module.cuda = types.SimpleNamespace(Device=Device)  # type: ignore[attr-defined]
        module.RawModule = RawModule  # type: ignore[attr-defined]
        return module


@pytest.fixture
def fake_cupy(monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path) -> Iterator[FakeCuPy]:
    fake = FakeCuPy()
    monkeypatch.setitem(sys.modules, "cupy", fake.module())
    monkeypatch.setattr(jit, "source_root", lambda: root)
    monkeypatch.setattr(jit, "_loaded", {})
    monkeypatch.setattr(jit, "_opted_in", {})
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "load"))
    yield fake


@needs_nvrtc
def test_load_is_per_device_and_once(fake_cupy: FakeCuPy, tmp_path: Path) -> None:
    kernels: list[jit.LoadedKernel] = []
    run_threads(8, lambda i: kernels.append(jit.load(Toy(), i % 2, arch="sm_80", dynamic_shared_bytes=1024)))
    assert len({id(kernel) for kernel in kernels}) == 2
    assert sorted(index for index, _, _ in fake_cupy.loads) == [0, 1]
    assert all(name == "toy" and Path(path).is_relative_to(tmp_path / "load") for _, path, name in fake_cupy.loads)
    assert {kernel.function for kernel in kernels} == {1001, 1002}
    assert fake_cupy.opt_ins == []


@needs_nvrtc
def test_load_opts_in_to_the_largest_shared_memory_asked_for(fake_cupy: FakeCuPy) -> None:
    limit = 48 * 1024 - 64 * 4  # the toy has 256 bytes of static shared memory
    for size in (limit, limit + 1, 1000, 90000, limit + 1):
        jit.load(Toy(), 3, arch="sm_80", dynamic_shared_bytes=size)
    assert fake_cupy.opt_ins == [(3, limit + 1), (3, 90000)]
    assert len(fake_cupy.loads) == 1


# Devices


def test_known_devices() -> None:
    table = {arch: device.known_device(arch) for arch in ("sm_80", "sm_86", "sm_89", "sm_90")}
    assert {arch: info.arch for arch, info in table.items()} == {arch: arch for arch in table}
    assert [info.shared_memory for info in table.values()] == [166912, 101376, 101376, 232448]
    assert [info.shared_memory_sm for info in table.values()] == [167936, 102400, 102400, 233472]
    assert [info.multiprocessors for info in table.values()] == [108, 84, 142, 132]
    assert not any(device.is_present(info) for info in table.values())
    assert tuple(device.ARCHITECTURES) == (*list(table)[:2], "sm_87", *list(table)[2:], "sm_100", "sm_103", "sm_120")
    for arch, shared, multiprocessors in (("sm_87", 163, 16), ("sm_100", 227, 148), ("sm_120", 99, 170)):
        info = device.known_device(arch)
        assert (info.arch, info.multiprocessors) == (arch, multiprocessors)
        assert (info.shared_memory, info.shared_memory_sm) == (shared * 1024, (shared + 1) * 1024)
    for spelling in ("sm_90a", "90", "9.0", "90a"):
        assert device.known_device(spelling) == table["sm_90"]
    assert device.known_device("12.0") == device.known_device("120") == device.known_device("sm_120")


@pytest.mark.parametrize("arch", ["sm_75", "75", "7.5"])
def test_old_architectures_are_refused(arch: str) -> None:
    with pytest.raises(ValueError, match=rf"arch='{arch}' is too old.*8\.0 or newer; use one of sm_80, .*sm_120"):
        device.known_device(arch)


@pytest.mark.parametrize("arch", ["sm_1", "sm_99", "hopper", "", "sm_9.00", "sm_90x"])
def test_unknown_architectures_are_refused(arch: str) -> None:
    with pytest.raises(ValueError, match=rf"arch='{arch}' is (not in the table|too old)"):
        device.known_device(arch)


def test_an_architecture_is_a_string() -> None:
    with pytest.raises(TypeError, match=r"arch=90 must be a string, for example 'sm_90', not int"):
        device.known_device(90)  # type: ignore[arg-type]


# The compile check of CI


def _check_kernels() -> Any:
    path = Path(__file__).parent.parent / ".ci" / "check_kernels.py"
    if not path.is_file():
        pytest.skip(".ci/check_kernels.py is not here (only a checkout has it)")
    spec = importlib.util.spec_from_file_location("check_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SASS = """
        .headerflags    @"EF_CUDA_SM80"
        /*0000*/                   LDGSTS.E.BYPASS.LTC128B.128 [R12], [R2.64] ;       /* 0x000000 */
        /*0010*/              @!P0 HMMA.16816.F32.BF16 R4, R8, R2, R4 ;               /* 0x000000 */
        /*0020*/             @UP1  UMOV UR4, 0x1 ;
        /*0030*/                   EXIT ;   /* LDSM is only in a comment */
"""


def test_opcodes_are_read_from_sass() -> None:
    check = _check_kernels()
    opcodes = check.opcodes(SASS)
    assert opcodes == {"LDGSTS.E.BYPASS.LTC128B.128", "HMMA.16816.F32.BF16", "UMOV", "EXIT"}
    assert check.missing(opcodes, ("HMMA", "LDGSTS.E", "LDSM", "MMA", "HMMA.16816.F32.BF")) == [
        "LDSM",
        "MMA",
        "HMMA.16816.F32.BF",
    ]


def test_findings_name_every_fault() -> None:
    check = _check_kernels()
    clean = jit.CompileReport(100, 0, 0, 0, 0, "ptxas info : fine", 0.1, False)
    assert check.findings(clean, SASS, ("HMMA", "LDGSTS")) == []
    bad = dataclasses.replace(clean, spill_store_bytes=4, stack_bytes=8, log="ptxas info : (C7510) wgmma is serialized")
    text = "\n".join(check.findings(bad, SASS, ("LDSM",)))
    assert all(word in text for word in ("4 bytes of spill stores", "8 bytes of stack", "C7510", "LDSM"))


@needs_nvrtc
def test_the_check_passes_and_fails_a_toy_kernel(
    root: Path, store: cache.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    check = _check_kernels()
    try:
        check.disassembler()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    good = [(Toy(), "sm_80", ("LDG", "STS", "BAR")), (Toy(tile=32), "sm_90a", ("LDG",))]
    assert check.check(good, store=store, root=root) == 0
    assert "2 kernels, 0 failed" in capsys.readouterr().out
    assert check.check([*good, (Toy(tile=16), "sm_80", ("HMMA",))], store=store, root=root) == 1
    output = capsys.readouterr().out
    assert "3 kernels, 1 failed" in output and "no HMMA in the SASS" in output
    (root / "lib/math.cuh").write_text("nonsense\n")
    assert check.check(good[:1], store=store, root=root) == 1
    assert "did not compile" in capsys.readouterr().out
    assert check.check([], store=store, root=root) == 1, "checking nothing must not pass"
