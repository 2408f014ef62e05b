"""The demo: a noisy picture cleaned by attention, checked against float64 and timed against two-pass attention.

Non-local means, a classic way to remove noise, is softmax attention: every patch of the image becomes the average of
all patches, weighted by how alike they look. So a small image gives real q, k and v, and attention maps worth seeing.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cuflash
from cuflash.explain import describe_device, describe_problem
from cuflash.measure import Place, matplotlib_problem, two_pass_attention
from cuflash.reference import ErrorReport, check_forward

Array = np.ndarray[Any, Any]

HEADS, HEAD_DIM = 4, 64
MIN_SIZE = 64  # a smaller picture has too few patches alike to be worth seeing
_PATCH = 2  # side of the square of pixels that one token stands for
_CONTEXT = 2  # pixels around it that decide how alike two tokens are
_NOISE = 0.13
_BANDWIDTH = 0.4  # in units of the distance that noise alone puts between two equal patches
_QUERIES = ((0.715, 0.27), (0.30, 0.40), (0.66, 0.62), (0.12, 0.86))  # (x, y) in the picture


def scene(size: int) -> Array:
    """A picture of `size` x `size` pixels with several textures, float64 RGB in [0, 1]."""
    fine = 3 * size  # drawn three times as fine, then averaged, so that edges are smooth
    y, x = np.mgrid[0:fine, 0:fine] / fine
    image = _mix((0.30, 0.52, 0.80), (0.97, 0.84, 0.66), y / 0.7)
    sun = np.hypot(x - 0.72, y - 0.27)
    rings = np.sin(sun * 150) > 0
    image = np.where((sun < 0.19)[..., None], _mix((0.98, 0.80, 0.25), (0.90, 0.38, 0.12), rings), image)
    ball = np.hypot(x - 0.30, y - 0.40) < 0.22
    stripes = np.sin((x + y) * 90) > 0
    image = np.where(ball[..., None], _mix((0.16, 0.30, 0.42), (0.45, 0.78, 0.72), stripes), image)
    row = np.floor(y * 16)
    mortar = ((y * 16) % 1 < 0.16) | ((x * 8 + 0.5 * (row % 2)) % 1 < 0.09)
    wall = y > 0.72
    image = np.where(wall[..., None], _mix((0.62, 0.24, 0.18), (0.85, 0.80, 0.74), mortar), image)
    tile = (np.abs(x - 0.66) < 0.16) & (np.abs(y - 0.62) < 0.13)
    checks = (np.floor(x * 24) + np.floor(y * 24)) % 2
    image = np.where(tile[..., None], _mix((0.20, 0.16, 0.30), (0.93, 0.90, 0.86), checks), image)
    smooth: Array = image.reshape(size, 3, size, 3, 3).mean(axis=(1, 3))
    return smooth


def _mix(first: tuple[float, ...], second: tuple[float, ...], amount: Any) -> Array:
    t = np.clip(np.asarray(amount, float), 0, 1)[..., None]
    mixed: Array = (1 - t) * np.array(first) + t * np.array(second)
    return mixed


def tokens(image: Array, dtype: str) -> tuple[Array, Array, Array]:
    """q, k and v of an image: (1, tokens, 4, 64) twice and (1, tokens, 4, 12), a token for each 2 x 2 pixels.

    Each head sees the patch and its surroundings through its own random projection y, drawn from a fixed seed. With
    ``q = [y, 1]`` and ``k = [y, -|y|^2 / 2]``, softmax(q @ k.T) weighs by ``exp(-|y_i - y_j|^2 / 2)``. Values are the
    pixels themselves.
    """
    side = _PATCH + 2 * _CONTEXT
    padded = np.pad(image, ((_CONTEXT, _CONTEXT), (_CONTEXT, _CONTEXT), (0, 0)), "reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (side, side), axis=(0, 1))[::_PATCH, ::_PATCH]
    looks = windows.reshape(windows.shape[0] * windows.shape[1], -1)
    looks = (looks - looks.mean(axis=0)) / (_BANDWIDTH * _NOISE * np.sqrt(2 * looks.shape[1]))
    rng = np.random.default_rng(2205)
    projections = rng.standard_normal((HEADS, looks.shape[1], HEAD_DIM - 1)) / np.sqrt(HEAD_DIM - 1)
    y = np.einsum("tf,hfd->thd", looks, projections)[None]
    q = np.concatenate([y, np.ones_like(y[..., :1])], axis=-1)
    k = np.concatenate([y, -np.square(y).sum(axis=-1, keepdims=True) / 2], axis=-1)
    pixels = _patches(image)[None, :, None, :]
    v = np.broadcast_to(pixels, (1, pixels.shape[1], HEADS, pixels.shape[3]))
    return q.astype(dtype), k.astype(dtype), np.ascontiguousarray(v.astype(dtype))


def _patches(image: Array) -> Array:
    n = image.shape[0] // _PATCH
    patches: Array = image.reshape(n, _PATCH, n, _PATCH, 3).swapaxes(1, 2).reshape(n * n, -1)
    return patches


def _image(patches: Array) -> Array:
    n = round(np.sqrt(patches.shape[0]))
    side = n * _PATCH
    image: Array = patches.reshape(n, n, _PATCH, _PATCH, 3).swapaxes(1, 2).reshape(side, side, 3)
    return image


def psnr(image: Array, clean: Array) -> float:
    """Peak signal-to-noise ratio in dB of an image in [0, 1]."""
    return float(-10 * np.log10(np.mean(np.square(image - clean))))


@dataclass(frozen=True)
class Cost:
    """What one call takes."""

    seconds: float
    bytes: int


@dataclass(frozen=True)
class Result:
    """What the demo found, for printing and for the picture; `two_pass` is None when it would need too much memory."""

    clean: Array
    noisy: Array
    output: Array
    maps: list[Array]
    spots: list[tuple[int, int]]
    variant: str | None
    problem: str
    place: str
    shape: tuple[int, ...]
    errors: ErrorReport
    ours: Cost
    two_pass: Cost | None


def compute(size: int, place: Place) -> Result:
    """Make the image, run attention and measure it.

    Raises
    ------
    AssertionError
        When the result is further from float64 than the error rule allows.
    """
    clean = scene(size)
    noisy = np.clip(clean + np.random.default_rng(7).normal(0, _NOISE, clean.shape), 0, 1)
    host = tokens(noisy, "float16" if place.gpu else "float32")
    q, k, v = (place.put(x) for x in host)

    def ours() -> Any:
        return cuflash.attention(q, k, v, scale=1.0, return_lse=True)

    def two_pass() -> Any:
        return two_pass_attention(place.xp, q, k, v, scale=1.0)

    out, lse = (place.get(x) for x in ours())
    errors = check_forward(out, *host, lse=lse, scale=1.0)
    how = cuflash.explain(q, k, v, scale=1.0)
    timed = [ours, two_pass] if _score_bytes(size) <= place.available_bytes() / 4 else [ours]
    memory = [place.peak_bytes(function) for function in timed]
    costs = [Cost(*cost) for cost in zip(_race(timed, place), memory, strict=True)]
    side = size // _PATCH
    spots = [(int(x * side), int(y * side)) for x, y in _QUERIES]
    return Result(
        clean=clean,
        noisy=noisy,
        output=np.clip(_image(out[0].astype(np.float64).mean(axis=1)), 0, 1),
        maps=[_attention_map(host[0], host[1], lse, y * side + x, side) for x, y in spots],
        spots=spots,
        variant=how.variant,
        problem=describe_problem(how.problem),
        place=describe_device(how.device),
        shape=out.shape,
        errors=errors,
        ours=costs[0],
        two_pass=costs[1] if len(costs) > 1 else None,
    )


def _score_bytes(size: int) -> int:
    """All scores of a picture in float32, which two-pass attention holds at once."""
    return 4 * HEADS * (size // _PATCH) ** 4


def _race(functions: Sequence[Callable[[], Any]], place: Place) -> list[float]:
    """Best seconds of each, run in turns."""
    best = [float("inf")] * len(functions)
    for _ in range(3):
        for i, function in enumerate(functions):
            if not place.gpu:
                time.sleep(0.1)  # threads of the BLAS spin for a while after a product, and would disturb the next
            best[i] = min(best[i], place.seconds(function))
    return best


def _attention_map(q: Array, k: Array, lse: Array, query: int, side: int) -> Array:
    """Weights of one query on all tokens, averaged over the heads: exactly exp(score - lse)."""
    scores = np.einsum("hd,thd->ht", q[0, query].astype(np.float64), k[0].astype(np.float64))
    weights: Array = np.exp(scores - lse[0, :, query, None]).mean(axis=0)
    return weights.reshape(side, side)


def run(size: int, device: str, output: Path) -> int:
    """The ``demo`` command; returns the exit status. Without matplotlib `output` must be a PNG file."""
    place = Place.choose(device)
    try:
        result = compute(size, place)
    except AssertionError as error:
        print(f"FAILED: {error}")
        return 1
    report(result)
    if matplotlib_problem():
        write_png(output, montage(result))
        print(f"picture   {output} (without labels; pip install 'cuflash[plot]' adds them)")
    else:
        draw(result, output)
        print(f"picture   {output}")
    return 0


def report(result: Result) -> None:
    """Print what was computed and measured."""
    errors, ours, two_pass, side = result.errors, result.ours, result.two_pass, result.clean.shape[0]
    print(f"input     a picture of {side} x {side} pixels with noise, one token for each {_PATCH} x {_PATCH} pixels")
    print(f"problem   {result.problem}")
    print(f"device    {result.place}")
    print(f"variant   {result.variant}")
    print(f"result    shape {result.shape}")
    print(f"error     max {errors.max_error:.2g}, RMS {errors.rms_error:.2g} against float64", end=" ")
    print(f"(allowed {errors.max_bound:.2g} and {errors.rms_bound:.2g}); lse {errors.lse_max_error:.2g}")
    speed, memory = f"time      {_time(ours.seconds)}", f"memory    {ours.bytes / 1e6:.1f} MB"
    if two_pass is not None:
        ratio = two_pass.seconds / ours.seconds
        speed += f"; two-pass {_time(two_pass.seconds)}, {ratio:.1f} times as long"
        memory += f"; two-pass {two_pass.bytes / 1e6:.1f} MB"
    print(f"{speed}\n{memory} (peak of what a call allocates)")
    if two_pass is None:
        scores = f"{_score_bytes(side) / 1e9:.3g} GB"
        print(f"two-pass  left out: its scores, {scores}, are more than a quarter of the memory that is available")
    noisy, clean = psnr(result.noisy, result.clean), psnr(result.output, result.clean)
    print(f"denoised  {noisy:.1f} dB before, {clean:.1f} dB after (peak signal-to-noise ratio)")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


_MARKS = ("#ffffff", "#00e5ff", "#ff4fd8", "#b6ff3b")


def draw(result: Result, path: Path) -> None:
    """Write the picture with matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(13, 7.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    parts: Any = figure.subfigures(2, 1, height_ratios=(1.2, 1))
    top, bottom = parts
    noisy, clean = psnr(result.noisy, result.clean), psnr(result.output, result.clean)
    panels = (
        (result.noisy, f"Input: noisy, {noisy:.1f} dB"),
        (result.output, f"Output of attention: {clean:.1f} dB"),
        (result.clean, "The picture without noise"),
    )
    for axes, (image, title) in zip(top.subplots(1, 3), panels, strict=True):
        axes.imshow(image, interpolation="nearest")
        axes.set_title(title, fontsize=12)
        axes.set_axis_off()
        for number, ((x, y), colour) in enumerate(zip(result.spots, _MARKS, strict=True), 1):
            if image is result.noisy:
                corner, side = (x * _PATCH - 2.5, y * _PATCH - 2.5), _PATCH + 4
                axes.add_patch(Rectangle(corner, side, side, fill=False, edgecolor="black", linewidth=3.5))
                axes.add_patch(Rectangle(corner, side, side, fill=False, edgecolor=colour, linewidth=1.8))
                label = {"boxstyle": "round,pad=0.15", "facecolor": "black", "edgecolor": colour}
                axes.text(x * _PATCH + 7, y * _PATCH - 4, str(number), color=colour, fontsize=10, bbox=label)
    shown = bottom.subplots(1, len(result.maps))
    for number, (axes, weights, spot) in enumerate(zip(shown, result.maps, result.spots, strict=True), 1):
        last = axes.imshow(_brightness(weights), cmap="magma", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(f"What patch {number} attends to", fontsize=11)
        axes.set_axis_off()
        axes.scatter(*spot, s=70, facecolors="none", edgecolors=_MARKS[number - 1], linewidths=1.6)
    bar = bottom.colorbar(last, ax=list(shown), shrink=0.85, pad=0.01, ticks=[0, 1])
    bar.ax.set_yticklabels(["0", "largest"])
    bar.set_label("attention weight (square-root scale)")
    figure.suptitle("Non-local means is attention: every patch becomes the average of the patches that look like it")
    figure.savefig(path, dpi=110)


def _brightness(weights: Array) -> Array:
    """Weights as 0..1; the largest few, which would leave all others dark, are left out of the scale."""
    bright: Array = np.clip(np.sqrt(weights / np.partition(weights.ravel(), -4)[-4]), 0, 1)
    return bright


def montage(result: Result) -> Array:
    """The same panels with no label, as (height, width, 3) uint8."""
    side = 256

    def enlarged(image: Array) -> Array:
        index = np.arange(side) * image.shape[0] // side
        pixels: Array = image[index][:, index]
        return pixels

    white = np.ones((side, side, 3))
    top = [enlarged(x) for x in (result.noisy, result.output, result.clean)]
    bottom = [enlarged(_heat(_brightness(x))) for x in result.maps]
    rows = [np.concatenate([*top, white][: len(bottom)], axis=1), np.concatenate(bottom, axis=1)]
    whole: Array = np.round(np.concatenate(rows) * 255).astype(np.uint8)
    return whole


def _heat(x: Array) -> Array:
    """Black, red, yellow, white for 0 to 1."""
    colours: Array = np.clip(np.stack([3 * x, 3 * x - 1, 3 * x - 2], axis=-1), 0, 1)
    return colours


def write_png(path: Path, image: Array) -> None:
    """Write (height, width, 3) uint8 as a PNG file."""
    height, width, _ = image.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # a filter byte, 0 for none, starts each row
    rows[:, 1:] = image.reshape(height, -1)
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for kind, data in chunks:
            file.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))
