"""Kernels compiled and loaded for a real GPU: a cold cache under threads and processes, and modules per device."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from backends import TARGETS, assert_same_bits

import cuflash
from cuflash import jit

pytestmark = pytest.mark.gpu

# Eight threads each ask for three kernels, each beginning at another one.
WORKER = """
import sys, threading, time
import numpy as np
from backends import TARGETS
from cuflash.reference import check_forward

target = next(t for t in TARGETS if t.framework == "cupy" and t.dtype == "bfloat16")
dims = (32, 64, 128)
inputs = {d: target.inputs(b=1, m=150, n=170, hq=2, hkv=1, d=d) for d in dims}
target.make(inputs[32][0])  # the CUDA context is not part of what is timed
barrier, failures, first = threading.Barrier(8), [], []

def work(index):
    try:
        barrier.wait()
        for step in range(6):
            d = dims[(index + step) % 3]
            start = time.perf_counter()
            out, lse = target.attend(*inputs[d], causal=True)
            if step == 0:
                first.append(time.perf_counter() - start)
            check_forward(out, *inputs[d], lse=lse, causal=True)
    except BaseException as error:
        failures.append(error)

threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(f"slowest first call {max(first, default=0):.2f} s")
if failures:
    raise failures[0]
"""


def start(script, directory, **more):
    """A Python process with its own kernel store, on this process's import path."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {**os.environ, "CUFLASH_CACHE_DIR": str(directory), "PYTHONPATH": path, **more}
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def finish(process):
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out


def test_two_processes_of_eight_threads_on_a_cold_cache(tmp_path):
    processes = [start(WORKER, tmp_path / "cold") for _ in range(2)]
    for process in processes:
        print("cold:", finish(process).strip())
    assert len(list((tmp_path / "cold").rglob("*.cubin"))) == 3
    print("warm:", finish(start(WORKER, tmp_path / "cold")).strip())
    assert len(list((tmp_path / "cold").rglob("*.cubin"))) == 3


def test_a_damaged_cubin_is_replaced(tmp_path):
    directory = tmp_path / "store"
    finish(start(WORKER, directory))
    for path in directory.rglob("*.cubin"):
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[:1000])
    with_warnings = start(WORKER, directory, PYTHONWARNINGS="ignore")
    finish(with_warnings)


ONE_CALL = """
import time
from backends import TARGETS
target = next(t for t in TARGETS if t.framework == "cupy" and t.dtype == "bfloat16")
inputs = target.inputs(m=64, n=64, d=64)
target.make(inputs[0])
start = time.perf_counter()
target.attend(*inputs)
print(f"first call {time.perf_counter() - start:.2f} s")
"""


def test_first_call_cold_and_warm(tmp_path):
    print("cold:", finish(start(ONE_CALL, tmp_path)).strip())
    print("warm:", finish(start(ONE_CALL, tmp_path)).strip())


def test_a_second_call_loads_and_compiles_nothing(monkeypatch):
    target = next(t for t in TARGETS if t.framework == "cupy" and t.dtype == "bfloat16")
    inputs = target.inputs(m=64, n=64, d=64)
    want, _ = target.attend(*inputs)

    def refuse(*_, **__):
        raise AssertionError("compiled or loaded again")

    for name in ("compile_config", "load"):
        monkeypatch.setattr(jit, name, refuse)
    began = time.perf_counter()
    assert_same_bits(target.attend(*inputs)[0], want)
    print(f"second call {1e3 * (time.perf_counter() - began):.2f} ms")


def test_modules_are_loaded_on_each_device():
    target = next(t for t in TARGETS if t.framework == "cupy" and t.dtype == "bfloat16")
    cupy = target.kit.xp
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    inputs = target.inputs(m=64, n=64, d=64)
    want, _ = target.attend(*inputs)
    for index in range(cupy.cuda.runtime.getDeviceCount()):
        with cupy.cuda.Device(index):
            arrays = [target.make(x) for x in inputs]
        out = cuflash.attention(*arrays)
        assert out.device.id == index
        assert_same_bits(target.kit.numpy(out), want)
