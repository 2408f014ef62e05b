"""Hypothesis strategies of attention calls: shapes at tile edges, grouped heads, masks, scales and hostile values."""

from dataclasses import dataclass, field

import ml_dtypes  # noqa: F401  (registers bfloat16 casts with NumPy)
import numpy as np
from backends import DTYPES
from hypothesis import strategies as st

EDGES = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 193, 255, 256, 257)
# Few pairs: on a GPU each is a kernel to compile.
DIMS = ((8, 8), (31, 31), (32, 32), (64, 64), (80, 48), (128, 128), (192, 128), (256, 256))
KINDS = ("normal", "outliers", "equal keys", "few keys", "large scores", "large values", "tiny values")


@dataclass
class Case:
    """NumPy inputs in bshd order and the options of the call."""

    q: np.ndarray = field(repr=False)
    k: np.ndarray = field(repr=False)
    v: np.ndarray = field(repr=False)
    options: dict
    kind: str
    seed: int

    def __repr__(self):
        shapes = f"q {self.q.shape}, k {self.k.shape}, v {self.v.shape} {self.q.dtype}"
        return f"Case({shapes}, {self.options}, {self.kind!r}, seed {self.seed})"

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))  # Hypothesis would print the arrays

    @property
    def arrays(self):
        return self.q, self.k, self.v


def lengths(largest=257):
    """Sequence lengths, tile edges more often than others."""
    return st.sampled_from([n for n in EDGES if n <= largest]) | st.integers(1, largest)


@st.composite
def heads(draw, largest=4):
    """(heads_q, heads_kv) with every ratio."""
    hkv = draw(st.integers(1, largest))
    return hkv * draw(st.integers(1, max(largest // hkv, 1))), hkv


def sides():
    return st.none() | st.integers(0, 8) | st.sampled_from([31, 63, 64, 65, 127, 128, 1000])


def masks(*, causal=(False, True, "bottom-right", "top-left")):
    """The options that hide keys."""
    window = st.none() | st.tuples(sides(), sides())
    return st.fixed_dictionaries({"causal": st.sampled_from(causal), "window": window})


SCORES = ({"scale": -0.4}, {"scale": 0.125}, {"softcap": 2.0}, {"softcap": 30.0, "scale": -0.25})


def scores(few=(*SCORES, {"scale": 0.0})):
    """The options that change scores; most often none."""
    return st.just({}) | st.sampled_from(few)


def values(rng, kind, b, m, n, hq, hkv, d, dv, dtype):
    """q, k and v of one kind, rounded to the dtype."""
    q, k, v = (rng.standard_normal(s) for s in ((b, m, hq, d), (b, n, hkv, d), (b, n, hkv, dv)))
    if kind == "outliers":
        for x in (q, k, v):
            x *= np.where(rng.random(x.shape) < 0.02, 12, 1)
    elif kind == "equal keys":
        k[:] = k[:, :1]
    elif kind == "few keys":
        k[:] = k[:, rng.integers(0, min(n, 3), n)]
    elif kind == "large scores":
        q *= 4
    elif kind == "large values":
        v *= 1e4
    elif kind == "tiny values":
        v *= 2.0**-16
    return tuple(x.astype(dtype) for x in (q, k, v))


@st.composite
def cases(draw, dtype, *, mask=None, score=None, square=False, largest=257, most_heads=4, kinds=KINDS, batch=2):
    """A :class:`Case` of a dtype (its name); `mask` and `score` are strategies of options."""
    m = draw(lengths(largest))
    n = m if square else draw(lengths(largest))
    return _fill(draw, dtype, draw(st.integers(1, batch)), m, n, draw(heads(most_heads)), mask, score, kinds)


@st.composite
def measurable_cases(draw, dtype, *, mask=None, score=None, kinds=KINDS, largest=140):
    """A :class:`Case` for the error rule, with query rows enough for it to mean something.

    The rule compares the largest rounding errors of two computations. The weights of a row share an error, so on a few
    rows, or on rows that are all the same, the yardstick may be exact by luck.
    """
    wide = dtype in ("float32", "float64")
    if wide:
        score = scores(SCORES) if score is None else score
        kinds = [kind for kind in kinds if kind != "equal keys"]
    m, n = draw(lengths(largest)), draw(lengths(largest))
    hq, hkv = draw(heads(2))
    b = max(1, -(-64 // (m * hq)))
    return _fill(draw, dtype, b, m, n, (hq, hkv), mask, score, kinds)


def _fill(draw, dtype, b, m, n, hq_hkv, mask, score, kinds):
    d, dv = draw(st.sampled_from(DIMS))
    options = {**draw(masks() if mask is None else mask), **draw(scores() if score is None else score)}
    kind, seed = draw(st.sampled_from(kinds)), draw(st.integers(0, 2**32 - 1))
    q, k, v = values(np.random.default_rng(seed), kind, b, m, n, *hq_hkv, d, dv, DTYPES[dtype])
    return Case(q, k, v, options, kind, seed)
