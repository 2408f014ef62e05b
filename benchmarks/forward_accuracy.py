"""Error of our forward pass and torch's beside it, against float64, on the same inputs. Needs a GPU and torch.

    python benchmarks/forward_accuracy.py

Inputs are random normal, and random normal with 0.1 % of the entries of standard deviation 10. The table gives the
largest and the root-mean-square error of the output; the last column is that of rounding the exact result to bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from tile_sweep import exact

import cuflash

SEQLEN, HEADS = 2048, 4


def normal(shape: tuple[int, ...], outliers: bool) -> Any:
    """bfloat16 inputs."""
    x = torch.randn(shape, device="cuda")
    if outliers:
        x = torch.where(torch.rand_like(x) < 1e-3, 10 * torch.randn_like(x), x)
    return x.to(torch.bfloat16)


def torch_backend(name: str, q: Any, k: Any, v: Any, causal: bool) -> Any:
    """torch's attention by one backend, in bshd."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, name)):
        bhsd = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*bhsd, is_causal=causal).transpose(1, 2)


def error(out: Any, want: Any) -> str:
    """Largest and RMS error, in units of 1e-4."""
    difference = (out.double() - want).abs()
    return f"{1e4 * difference.max():8.2f} {1e4 * difference.square().mean().sqrt():6.3f}"


def main() -> None:
    """Print one row for each head dim, mask and kind of input."""
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), f"bfloat16, seqlen {SEQLEN}: max and RMS error, 1e-4")
    names = ("cuflash", "torch FA2", "torch cuDNN", "rounding alone")
    print(" " * 22, *(name.rjust(15) for name in names))
    for dim in (64, 128, 256):
        for causal in (False, True):
            for outliers in (False, True):
                q, k, v = (normal((1, SEQLEN, HEADS, dim), outliers) for _ in range(3))
                want = exact(q, k, v, causal)
                outs = [
                    cuflash.attention(q, k, v, causal=causal),
                    torch_backend("FLASH_ATTENTION", q, k, v, causal),
                    torch_backend("CUDNN_ATTENTION", q, k, v, causal),
                    want.to(torch.bfloat16),
                ]
                row = f"d{dim} {'causal' if causal else 'full'} {'outliers' if outliers else 'normal'}"
                print(row.ljust(22), *(error(out, want) for out in outs))


if __name__ == "__main__":
    main()
