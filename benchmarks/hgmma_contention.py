"""What the instructions of a softmax cost while the tensor cores run: ``python benchmarks/hgmma_contention.py``.

One warpgroup issues warpgroup products without a pause, the others repeat one kind of instruction on 32 independent
registers. Printed: clocks of a product alone and beside them, and clocks of an instruction a scheduler alone and beside
the products. Needs a GPU of compute capability 9.0 and CuPy.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from cuflash.jit import flatten
from cuflash.wgmma import wgmma_source

# Name, and C++ that changes float r with the help of b and c. Results of inline PTX are not reordered or dropped.
INSTRUCTIONS = {
    "FFMA": 'asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(r) : "f"(b), "f"(c));',
    "FADD": 'asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(r) : "f"(b));',
    "FMNMX": 'asm volatile("max.f32 %0, %0, %1;" : "+f"(r) : "f"(b));',
    "VIMNMX3": "r = __int_as_float(max(max(__float_as_int(r), __float_as_int(b)), __float_as_int(c)));",
    "F2FP": 'asm volatile("{.reg .b32 t; cvt.rn.bf16x2.f32 t, %0, %1; mov.b32 %0, t;}" : "+f"(r) : "f"(b));',
    "MUFU": 'asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(r));',
    "FFMA, MUFU, FADD, FMNMX": (
        'asm volatile("{fma.rn.f32 %0, %0, %1, %2; ex2.approx.ftz.f32 %0, %0; add.rn.f32 %0, %0, %1;'
        ' max.f32 %0, %0, %2;}" : "+f"(r) : "f"(b), "f"(c));'
    ),
}

KERNEL = """
using namespace cuflash;

// One store that never happens keeps the compiler from dropping the loops.
__device__ __forceinline__ void keep(float x, int* out) {
  if (x == 123.456f) *out = 1;
}

__device__ __forceinline__ void products(int count, int* out) {
  float d[1][WIDTH / 8][4] = {};
  const unsigned a[4] = {threadIdx.x, 0, 0, 0};
  const uint64 query = matrix_descriptor(Swizzle::bytes_128, 16, 1024);
  const uint64 key = matrix_descriptor(Swizzle::bytes_128, FROM_REGISTERS ? 16384 : 16, 1024);
#pragma unroll 1
  for (int i = 0; i < count; i += 8) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (FROM_REGISTERS)
        Wgmma<WIDTH, bfloat16>::rs<1>(d, a, key + 128 * k, 1);
      else
        Wgmma<WIDTH, bfloat16>::ss<0>(d, query + 2 * (k % 4), key + 2 * (k % 4), 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
  }
#pragma unroll
  for (int n = 0; n < WIDTH / 8; ++n) keep(d[0][n][0] + d[0][n][1] + d[0][n][2] + d[0][n][3], out);
}

__device__ __forceinline__ void instructions(int count, int* out) {
  float register_[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) register_[i] = threadIdx.x * 0.001f + i;
  const float b = threadIdx.x, c = blockIdx.x;
#pragma unroll 1
  for (int j = 0; j < count; j += 32)
#pragma unroll
    for (float& r : register_) { INSTRUCTION }
#pragma unroll
  for (float r : register_) keep(r, out);
}

extern "C" __global__ void __launch_bounds__(512, 1) contention(int product_count, int instruction_count, int* clocks) {
  extern __shared__ __align__(1024) char shared[];
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  __syncthreads();
  const int begin = clock();
  if (group == 0)
    products(product_count, clocks + 4);
  else
    instructions(instruction_count, clocks + 4);
  const int end = clock();
  if (threadIdx.x % 128 == 0 && blockIdx.x == 0) clocks[group] = end - begin;
}
"""


def source(width: int, from_registers: bool, instruction: str) -> str:
    """The translation unit for one product and one instruction."""
    kernel = KERNEL.replace("WIDTH", str(width)).replace("FROM_REGISTERS", str(int(from_registers)))
    return "\n".join(
        [flatten("ptx/wgmma.cuh"), wgmma_source((width,), "bfloat16"), kernel.replace("INSTRUCTION", instruction)]
    )


def compiled(text: str, folder: Path) -> Any:
    """The kernel, loaded by CuPy."""
    import cupy
    from cuda.core import Program, ProgramOptions

    path = folder / f"{abs(hash(text))}.cubin"
    path.write_bytes(bytes(Program(text, "c++", ProgramOptions(arch="sm_90a", std="c++17")).compile("cubin").code))
    kernel = cupy.RawModule(path=str(path)).get_function("contention")
    kernel.max_dynamic_shared_size_bytes = 100_000
    return kernel


def clocks(kernel: Any, warps: int, products: int, instructions: int) -> tuple[int, int]:
    """Clocks that the products, and that the instructions of one warp a scheduler took."""
    import cupy

    out = cupy.zeros(5, "int32")
    for _ in range(2):
        kernel((132,), (128 * (1 + warps),), (products, instructions, out), shared_mem=100_000)
    return int(out[0]), int(out[1])


def main() -> None:
    """Print a table for each kind of product."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warps", type=int, nargs="+", default=[1, 2, 3], help="of instructions, a scheduler")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for width, from_registers in ((128, False), (128, True), (64, True)):
            print(f"m64n{width}k16, a from {'registers' if from_registers else 'shared memory'}, {width // 2} clocks")
            print(f"{'':26s} warps | product alone, beside | instruction alone, beside")
            for name, code in INSTRUCTIONS.items():
                kernel = compiled(source(width, from_registers, code), Path(folder))
                for warps in args.warps:
                    n, m = 3200, 12800
                    product = clocks(kernel, warps, n, 0)[0] / n, clocks(kernel, warps, n // 4, 64 * m)[0] / (n // 4)
                    alone, beside = (clocks(kernel, warps, count, m)[1] / m / warps for count in (0, 40 * n))
                    print(
                        f"{name:26s} {warps:5d} | {product[0]:13.1f}, {product[1]:6.1f} | {alone:17.2f}, {beside:6.2f}"
                    )


if __name__ == "__main__":
    main()
