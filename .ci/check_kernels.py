"""Compile every kernel Config with no GPU and look for spills, ptxas' performance notes and missing instructions.

The Configs come from ``cuflash.variants.ci_configs()``: (config, arch, SASS opcodes that must occur). Exit status 0
when all are good, 1 when one is not, 2 when there is no disassembler.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuflash import cache, jit

Case = tuple[Any, str, Sequence[str]]

# "   /*0010*/   @!P0 HMMA.16816.F32.BF16 R4, ..." as both nvdisasm and cuobjdump print it.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """The outcome of one Config."""

    config: str
    arch: str
    report: jit.CompileReport | None
    faults: list[str]


def disassembler() -> list[str]:
    """Command that prints the SASS of a cubin given as its last argument; from the pip packages, else from PATH.

    Raises
    ------
    FileNotFoundError
        When neither nvdisasm nor cuobjdump is installed.
    """
    for tool, flags in (("nvdisasm", ["-c"]), ("cuobjdump", ["-sass"])):
        try:
            from cuda.pathfinder import find_nvidia_binary_utility

            path = find_nvidia_binary_utility(tool)
        except ImportError:  # cuda-pathfinder before 1.4
            path = None
        path = path or _in_packages(tool) or shutil.which(tool)
        if path:
            return [path, *flags]
    raise FileNotFoundError("no nvdisasm or cuobjdump; pip install nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump")


def _in_packages(tool: str) -> str | None:
    from importlib import metadata

    for package in (f"nvidia-cuda-{tool}", f"nvidia-cuda-{tool}-cu12"):
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == tool:
                return str(file.locate())
    return None


def disassemble(cubin: Path) -> str:
    """The SASS of a cubin."""
    result = subprocess.run([*disassembler(), str(cubin)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{disassembler()[0]} failed on {cubin.name}: {result.stderr.strip()}")
    return result.stdout


def opcodes(sass: str) -> set[str]:
    """The opcodes with their modifiers, for example ``HMMA.16816.F32.BF16``."""
    return {match.rstrip(".") for match in _INSTRUCTION.findall(sass)}


def missing(present: set[str], expected: Iterable[str]) -> list[str]:
    """The expected opcodes that do not occur, where ``HMMA`` stands for ``HMMA`` with any modifiers."""
    return [want for want in expected if not any(f"{opcode}.".startswith(f"{want}.") for opcode in present)]


def findings(report: jit.CompileReport, sass: str, expected: Iterable[str]) -> list[str]:
    """What is wrong with a kernel, one line each."""
    amounts = {
        "spill stores": report.spill_store_bytes,
        "spill loads": report.spill_load_bytes,
        "stack": report.stack_bytes,
    }
    faults = [f"{amount} bytes of {what}" for what, amount in amounts.items() if amount]
    faults += [f"ptxas: {line.strip()}" for line in report.log.splitlines() if "C75" in line]
    return faults + [f"no {opcode} in the SASS" for opcode in missing(opcodes(sass), expected)]


def check_one(case: Case, store: cache.Store, root: Path | None) -> Row:
    """Compile and inspect one Config."""
    config, arch, expected = case
    try:
        compiled = jit.compile_config(config, arch, store=store, root=root)
        faults = findings(compiled.report, disassemble(compiled.path), expected)
    except Exception as error:  # one broken Config must not hide the others
        return Row(repr(config), arch, None, [str(error)])
    return Row(repr(config), arch, compiled.report, faults)


def print_row(row: Row) -> None:
    """One line of the table, and one for each fault."""
    if row.report is None:
        numbers = "     -       -       -       -"
    else:
        r = row.report
        spills = r.spill_store_bytes + r.spill_load_bytes
        numbers = f"{r.registers:6d} {r.static_shared_bytes:7d} {spills:7d} {r.seconds:7.2f}"
    print(f"{'FAIL' if row.faults else 'ok':4s} {row.arch:7s} {numbers}  {row.config}", flush=True)
    for fault in row.faults:
        print("     " + fault.replace("\n", "\n     "), flush=True)


def check(cases: Iterable[Case], *, store: cache.Store, root: Path | None = None) -> int:
    """Check all cases on all cores, print a table, and return the exit status; no case at all is a failure."""
    failed = total = 0
    print(f"{'':4s} {'arch':7s} {'regs':>6s} {'smem':>7s} {'spills':>7s} {'seconds':>7s}  config")
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # NVRTC compiles in parallel and lets go of the GIL
        for row in pool.map(lambda case: check_one(case, store, root), cases):
            print_row(row)
            total += 1
            failed += bool(row.faults)
    print(f"{total} kernels, {failed} failed")
    return 1 if failed or not total else 0


def main() -> int:
    """Check the Configs of every variant in a fresh store, so that nothing comes from an earlier run."""
    try:
        disassembler()
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    from cuflash.variants import ci_configs

    with tempfile.TemporaryDirectory(prefix="cuflash-check-") as directory:
        return check(ci_configs(), store=cache.Store(directory))


if __name__ == "__main__":
    sys.exit(main())
