"""Writes the C++ wrappers of the warpgroup products that a kernel uses.

``wgmma.mma_async`` names every accumulator register, and its widths come in 32 sizes, so a header of all of them would
be a matrix of instantiations. A Config needs two: this writes just those, in front of the kernel (PTX ISA,
"wgmma.mma_async").
"""

from __future__ import annotations

_PTX_TYPE = {"bfloat16": "bf16", "float16": "f16"}

_STRUCT = """\
template <>
struct Wgmma<{n}, {element}> {{
  template <int TransposeB, int TransposeA = 0>
  static __device__ __forceinline__ void ss(float (&d)[1][{blocks}][4], unsigned long long a, unsigned long long b,
                                            int accumulate) {{
    {ss}
  }}
  template <int TransposeB>
  static __device__ __forceinline__ void rs(float (&d)[1][{blocks}][4], const unsigned (&a)[4], unsigned long long b,
                                            int accumulate) {{
    {rs}
  }}
}};
"""


def wgmma_source(widths: tuple[int, ...], element: str) -> str:
    """C++ text of ``Wgmma<N, element>`` for each N of `widths`.

    Raises
    ------
    ValueError
        For a width that the instruction does not have, or an unknown element type.
    """
    if element not in _PTX_TYPE:
        raise ValueError(f"element={element!r} must be one of {', '.join(_PTX_TYPE)}")
    parts = ["namespace cuflash {\n", "template <int N, class Element>\nstruct Wgmma;\n"]
    for n in dict.fromkeys(widths):
        if n % 8 or not 8 <= n <= 256:
            raise ValueError(f"width {n} must be a multiple of 8 from 8 to 256")
        fields = {"n": n, "element": element, "blocks": n // 8}
        parts.append(_STRUCT.format(**fields, ss=_statement(n, element, False), rs=_statement(n, element, True)))
    return "".join([*parts, "}  // namespace cuflash\n"])


def _statement(n: int, element: str, a_in_registers: bool) -> str:
    count = n // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if a_in_registers else f"%{count}"
    b = count + (4 if a_in_registers else 1)
    kind = _PTX_TYPE[element]
    # scale-d, negate a and b, transpose a (only from shared memory) and b
    flags = f"p, 1, 1, %{b + 2}" if a_in_registers else f"p, 1, 1, %{b + 3}, %{b + 2}"
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, %{b + 1}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{accumulators}}}, {a}, %{b}, {flags}; }}"
    )
    outputs = ", ".join(f'"+f"(d[0][{i // 4}][{i % 4}])' for i in range(count))
    operand = ", ".join(f'"r"(a[{i}])' for i in range(4)) if a_in_registers else '"l"(a)'
    transposed = '"n"(TransposeB)' if a_in_registers else '"n"(TransposeB), "n"(TransposeA)'
    return f'asm volatile("{text}"\n: {outputs}\n: {operand}, "l"(b), "r"(accumulate), {transposed});'
