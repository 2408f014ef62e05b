"""Problems and layouts that no array was made for, for tests of the variants' choices."""

from cuflash.problem import check_options, make_problem
from cuflash.variants.base import Operand, Operands

KIB = 1024


def problem(d=64, dv=None, dtype="bfloat16", b=2, m=256, n=256, hq=4, hkv=2, **options):
    dv = d if dv is None else dv
    options = {"causal": False, "window": None, "softcap": 0.0, "scale": None, "layout": "bshd", **options}
    return make_problem((b, m, hq, d), (b, n, hkv, d), (b, n, hkv, dv), dtype, check_options(**options))


def operands(*alignments):
    q, k, v, out = (Operand((64, 64, 64), a) for a in (alignments if len(alignments) == 4 else alignments * 4))
    return Operands(q, k, v, out)
