"""The command line: ``python -m cuflash demo | doctor | bench | explain | precompile``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cuflash
from cuflash.device import ARCHITECTURES
from cuflash.problem import DTYPES, MAX_HEAD_DIM, BackwardProblem, Options, check_options, make_problem

_EPILOG = """\
examples:
  python -m cuflash demo                           clean a noisy picture by attention, write cuflash-demo.png
  python -m cuflash doctor                         what is installed, and a self-test
  python -m cuflash bench --head-dims 64,128       time against the libraries that are installed
  python -m cuflash explain --seqlen-q 4096 --seqlen-k 4096 --head-dim 128 --causal --device sm_90
  python -m cuflash precompile --arch sm_90        fill the kernel cache; needs no GPU

exit status: 0 all is well; 1 a check failed or the command could not run; 2 wrong usage
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; those of the process when None.

    Returns
    -------
    int
        The exit status: 0, or 1 when a check failed or the command could not run.

    Raises
    ------
    SystemExit
        With 2 for wrong usage and 0 for ``--help`` and ``--version``.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except _UsageError as error:
        args.parser.error(str(error))  # exits with 2
    except (OSError, ImportError, RuntimeError, NotImplementedError) as error:
        print(f"cuflash {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 2


class _UsageError(Exception):
    """Arguments that parse one by one but do not fit together."""


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="cuflash",
        description="Exact, IO-aware attention for NumPy, CuPy, PyTorch and JAX arrays.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cuflash {cuflash.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for add in (_add_demo, _add_doctor, _add_bench, _add_explain, _add_precompile):
        command = add(commands)
        command.set_defaults(parser=command)
    return parser


def _command(commands: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  python -m cuflash {name} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _integer(text: str, remedy: str = "must be an integer") -> int:
    try:
        return int(text)
    except ValueError:  # argparse would answer with the name of a function of ours
        raise argparse.ArgumentTypeError(f"{text!r} {remedy}") from None


def _positive(text: str) -> int:
    value = _integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _positives(text: str) -> list[int]:
    values = [_integer(part, "must be integers separated by commas, for example 64,128") for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{min(values)} must be at least 1")
    return values


def _head_dims(text: str) -> list[int]:
    dims = _positives(text)
    if max(dims) > MAX_HEAD_DIM:
        raise argparse.ArgumentTypeError(f"{max(dims)} is over the largest head dim, {MAX_HEAD_DIM}")
    return dims


def _dtypes(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(DTYPES)}")
    return names


def _side(text: str) -> int | None:
    return None if text == "none" else _integer(text, "must be an integer, or none for an open side")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number") from None


def _check_file(option: str, path: Path) -> None:
    """Refuse a file that could not be written after all the work."""
    if not path.parent.is_dir():
        raise _UsageError(f"{option} {path}: there is no directory {path.parent}")
    if path.is_dir():
        raise _UsageError(f"{option} {path} is a directory; name a file")


def _check_picture(option: str, path: Path) -> None:
    from cuflash.measure import matplotlib_problem

    _check_file(option, path)
    kinds, note = ["png"], "without matplotlib (pip install 'cuflash[plot]') "
    if not matplotlib_problem():
        from matplotlib.backend_bases import FigureCanvasBase

        kinds, note = sorted(FigureCanvasBase.get_supported_filetypes()), ""
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise _UsageError(f"{option} {path}: {note}the name must end in {', '.join('.' + kind for kind in kinds)}")


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to compute; auto takes a GPU when CuPy finds one (default: auto)",
    )


def _add_demo(commands: Any) -> argparse.ArgumentParser:
    parser = _command(commands, "demo", "clean a noisy picture by attention and draw what attends to what", "--size 96")
    _add_device(parser)
    parser.add_argument("--size", type=_positive, default=128, help="pixels a side, even, at least 64 (default: 128)")
    parser.add_argument("--output", type=Path, default=Path("cuflash-demo.png"), help="default: ./cuflash-demo.png")
    parser.set_defaults(run=_demo)
    return parser


def _demo(args: argparse.Namespace) -> int:
    from cuflash import demo

    if args.size < demo.MIN_SIZE or args.size % 2:
        raise _UsageError(f"--size {args.size} must be even and at least {demo.MIN_SIZE}")
    _check_picture("--output", args.output)
    return demo.run(args.size, args.device, args.output)


def _add_doctor(commands: Any) -> argparse.ArgumentParser:
    summary = "show what is installed, the GPU and the cache, and run a self-test"
    parser = _command(commands, "doctor", summary, "--json")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_doctor)
    return parser


def _doctor(args: argparse.Namespace) -> int:
    from cuflash import doctor

    return doctor.run(args.json)


def _add_bench(commands: Any) -> argparse.ArgumentParser:
    summary = "time the variants against torch, JAX and two-pass attention, where they are installed"
    parser = _command(commands, "bench", summary, "--head-dims 64,128 --seqlens 1024,4096 --causal --plot bench.png")
    _add_device(parser)
    parser.add_argument("--dtype", choices=DTYPES[:3], help="default: bfloat16 on a GPU, float32 on the CPU")
    parser.add_argument("--head-dims", type=_head_dims, help="default: 64,128,256 on a GPU, 64 on the CPU")
    parser.add_argument("--seqlens", type=_positives, help="default: 512 to 16384 on a GPU, 512 to 2048 on the CPU")
    parser.add_argument("--tokens", type=_positive, help="batch x seqlen (default: 16384 on a GPU, 2048 on the CPU)")
    parser.add_argument("--hidden", type=_positive, help="heads x head_dim (default: 2048 on a GPU, 512 on the CPU)")
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", help="only with a causal mask")
    mask.add_argument("--full", action="store_true", help="only without a mask")
    parser.add_argument("--rounds", type=_positive, default=7, help="timed rounds; medians are shown (default: 7)")
    parser.add_argument(
        "--plot", type=Path, help="draw the table as a picture, for example bench.png (needs matplotlib)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    parser.set_defaults(run=_bench)
    return parser


def _bench(args: argparse.Namespace) -> int:
    from cuflash import bench

    if args.plot:
        _check_picture("--plot", args.plot)
    if args.json:
        _check_file("--json", args.json)
    masks = (True,) if args.causal else (False,) if args.full else (False, True)
    return bench.run(args, masks)


def _add_explain(commands: Any) -> argparse.ArgumentParser:
    summary = "say which variant would compute a problem, how, and why not the others"
    parser = _command(
        commands, "explain", summary, "--seqlen-q 4096 --seqlen-k 4096 --heads-q 32 --heads-kv 8 --device sm_90"
    )
    for name, default in (("batch", 1), ("seqlen-q", 4096), ("seqlen-k", 4096), ("heads-q", 16), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=_integer, default=default, metavar="N", help=f"default: {default}")
    parser.add_argument("--heads-kv", type=_integer, metavar="N", help="default: as many as heads-q")
    parser.add_argument("--head-dim-v", type=_integer, metavar="N", help="default: as head-dim")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    parser.add_argument(
        "--causal",
        nargs="?",
        const="bottom-right",
        default=False,
        choices=("bottom-right", "top-left"),
        help="causal mask; bottom-right when no alignment is given",
    )
    parser.add_argument(
        "--window", nargs=2, type=_side, metavar=("LEFT", "RIGHT"), help="keys seen each side, or none for an open side"
    )
    parser.add_argument("--softcap", type=_number, default=0.0, metavar="CAP", help="default: no cap")
    parser.add_argument("--scale", type=_number, help="default: 1/sqrt(head-dim)")
    parser.add_argument("--backward", action="store_true", help="the gradients instead of attention itself")
    parser.add_argument("--deterministic", action="store_true", help="with --backward: the same bits in every run")
    parser.add_argument("--variant", help="the only variant to consider")
    parser.add_argument(
        "--device",
        default="current",
        help=f"{', '.join(ARCHITECTURES)} (none needs a GPU), cpu, or current: the GPU if there is one (default)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_explain)
    return parser


def _explain(args: argparse.Namespace) -> int:
    from cuflash.explain import explain_problem

    heads_kv = args.heads_q if args.heads_kv is None else args.heads_kv
    dim_v = args.head_dim if args.head_dim_v is None else args.head_dim_v
    shapes = (
        (args.batch, args.seqlen_q, args.heads_q, args.head_dim),
        (args.batch, args.seqlen_k, heads_kv, args.head_dim),
        (args.batch, args.seqlen_k, heads_kv, dim_v),
    )
    if min(min(shape) for shape in shapes) < 0:
        raise _UsageError("sizes must not be negative")
    try:
        options: Options = check_options(args.causal, args.window, args.softcap, args.scale, "bshd")
        problem = make_problem(*shapes, args.dtype, options)
        if args.backward:
            problem = BackwardProblem(**asdict(problem), deterministic=args.deterministic)
        explanation = explain_problem(problem, _device(args.device), variant=args.variant)
    except (ValueError, TypeError) as error:
        raise _UsageError(str(error)) from error
    print(json.dumps(explanation.as_dict(), indent=1) if args.json else explanation)
    return 0 if explanation.variant else 1


def _device(name: str) -> Any:
    from cuflash.device import device_info, known_device
    from cuflash.measure import gpu_problem
    from cuflash.variants.base import CPU

    if name == "cpu" or (name == "current" and gpu_problem()):
        return CPU
    return device_info(0) if name == "current" else known_device(name)


def _add_precompile(commands: Any) -> argparse.ArgumentParser:
    summary = "compile kernels into the cache, so that first calls do not wait"
    parser = _command(commands, "precompile", summary, "--arch sm_80 --arch sm_90 --head-dims 64,128")
    archs = ", ".join(ARCHITECTURES)
    parser.add_argument(
        "--arch", action="append", metavar="SM", help=f"one of {archs}; may be repeated (default: the GPU)"
    )
    parser.add_argument("--head-dims", type=_head_dims, default=[64, 128], help="default: 64,128")
    parser.add_argument("--dtypes", type=_dtypes, default=["bfloat16", "float16"], help="default: bfloat16,float16")
    parser.add_argument("--causal", choices=("yes", "no", "both"), default="both", help="default: both")
    parser.add_argument("--backward", action="store_true", help="the kernels for gradients too")
    parser.set_defaults(run=_precompile)
    return parser


def _precompile(args: argparse.Namespace) -> int:
    from cuflash import cache
    from cuflash.device import device_info, known_device
    from cuflash.measure import gpu_problem
    from cuflash.precompile import planned_kernels, usual_problems
    from cuflash.progress import Progress

    if args.arch is None and (problem := gpu_problem()):
        raise _UsageError(f"{problem}; name an architecture, for example --arch sm_90")
    try:
        devices = [known_device(arch) for arch in args.arch] if args.arch else [device_info(0)]
    except ValueError as error:
        raise _UsageError(str(error)) from error
    causal = {"yes": (True,), "no": (False,), "both": (False, True)}[args.causal]
    problems = usual_problems(args.head_dims, args.dtypes, causal, args.backward)
    with Progress(len(planned_kernels(problems, devices))) as progress:
        compiled = cuflash.precompile(problems, arch=args.arch, on_progress=progress.step)
    for kernel in compiled:
        state = "was there" if kernel.report.from_cache else f"{kernel.report.seconds:.2f} s"
        print(f"{kernel.arch:<7} {kernel.name} {_fields(kernel.config)}: {state}")
    print(f"{len(compiled)} kernels in {cache.default_store().root}")
    return 0


def _fields(config: Any) -> str:
    facts = asdict(config)
    names = ("element", "tile_d", "tile_dv", "has_band")
    return " ".join(f"{name} {facts[name]}" for name in names if name in facts)
