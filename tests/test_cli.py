"""The commands, run on the CPU with no GPU assumed: what they print, write and return."""

import json
import struct
import subprocess
import sys
import warnings
import zlib

import numpy as np
import pytest

import cuflash
from cuflash import bench, cache, demo, doctor, jit
from cuflash.bench_peers import Runner, runners
from cuflash.cli import main
from cuflash.measure import Place, available_memory, gpu_problem, two_pass_attention
from cuflash.precompile import usual_problems
from cuflash.reference import attention_reference

CPU = Place(np, gpu=False)
needs_compiler = pytest.mark.skipif(
    doctor.packages()["cuda.core"] == "not installed", reason="cuda-core, the compiler's front, is not installed"
)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def read_png(path):
    """(height, width, 3) of an 8-bit RGB file whose rows have filter 0, by the PNG specification."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, body, header = 8, b"", None
    while at < len(data):
        (size,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        chunk = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + chunk),)
        header = struct.unpack(">2I5B", chunk) if kind == b"IHDR" else header
        body += chunk if kind == b"IDAT" else b""
        at += 12 + size
    width, height, *rest = header
    assert rest == [8, 2, 0, 0, 0]
    rows = np.frombuffer(zlib.decompress(body), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_module_runs_as_a_program():
    result = subprocess.run([sys.executable, "-m", "cuflash", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"cuflash {cuflash.__version__}\n"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nothing"],
        ["demo", "--size", "0"],
        ["demo", "--size", "65"],
        ["demo", "--size", "62"],
        ["demo", "--device", "tpu"],
        ["demo", "--output", "no/such/directory/x.png"],
        ["demo", "--output", "picture"],
        ["demo", "--output", "picture.docx"],
        ["demo", "--output", "."],
        ["bench", "--plot", "no/such/directory/x.png"],
        ["bench", "--json", "no/such/directory/x.json"],
        ["bench", "--causal", "--full"],
        ["bench", "--head-dims", "64,300"],
        ["bench", "--seqlens", "64,many"],
        ["explain", "--heads-q", "5", "--heads-kv", "2"],
        ["explain", "--head-dim", "257"],
        ["explain", "--seqlen-q", "-1"],
        ["explain", "--device", "sm_75"],
        ["explain", "--window", "-1", "none"],
        ["explain", "--variant", "fast"],
        ["precompile", "--arch", "sm_1"],
        ["precompile", "--arch", "sm_80", "--dtypes", "int8"],
    ],
)
def test_wrong_usage_is_status_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["demo", "--size", "many"], "argument --size: 'many' must be an integer"),
        (["bench", "--seqlens", "64,x"], "'x' must be integers separated by commas, for example 64,128"),
        (["bench", "--seqlens", "64,0"], "argument --seqlens: 0 must be at least 1"),
        (["bench", "--head-dims", ""], "must be integers separated by commas, for example 64,128"),
        (["explain", "--batch", "two"], "argument --batch: 'two' must be an integer"),
        (["explain", "--scale", "big"], "argument --scale: 'big' must be a number"),
        (["explain", "--window", "1", "all"], "argument --window: 'all' must be an integer, or none for an open side"),
        (["explain", "--device", "sm_75"], "8.0 or newer"),
        (["precompile", "--arch", "7.5"], "8.0 or newer"),
    ],
)
def test_wrong_values_are_told_in_words(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    text = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in text and "invalid" not in text and " _" not in text


@pytest.mark.parametrize("command", ["demo", "doctor", "bench", "explain", "precompile"])
def test_help_has_an_example(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"python -m cuflash {command}" in capsys.readouterr().out


@pytest.mark.skipif(gpu_problem() is None, reason="there is a GPU")
def test_asking_for_an_absent_gpu_is_status_1(tmp_path, capsys):
    assert main(["demo", "--device", "cuda", "--output", str(tmp_path / "x.png")]) == 1
    assert "--device cuda" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["precompile"])
    assert stop.value.code == 2
    assert "--arch sm_90" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match=r"name an architecture, for example arch='sm_90'"):
        cuflash.precompile()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arch": 90}, "arch=90 must be a string, for example 'sm_90'"),
        ({"arch": ["sm_80", 9.0]}, "arch=9.0 must be a string"),
        ({"arch": "sm_80", "problems": 64}, r"problems holds 64.*cuflash\.problem\.Problem; pass"),
        ({"arch": "sm_80", "problems": ["bfloat16"]}, r"problems holds 'bfloat16'"),
        ({"arch": "sm_80", "workers": "two"}, "workers='two' must be an int or None"),
    ],
)
def test_precompile_refuses_other_types(arguments, message):
    with pytest.raises(TypeError, match=message):
        cuflash.precompile(**arguments)


@pytest.mark.parametrize("workers", [0, -1])
def test_precompile_needs_a_worker(workers):
    with pytest.raises(ValueError, match=f"workers={workers} must be at least 1"):
        cuflash.precompile(arch="sm_80", workers=workers)


def test_package_shows_no_names_of_others():
    assert not {"PackageNotFoundError", "version"} & set(dir(cuflash))


def test_demo_draws_with_matplotlib(tmp_path, capsys):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "demo.png"
    assert main(["demo", "--size", "64", "--device", "cpu", "--output", str(path)]) == 0
    text = capsys.readouterr().out
    assert "variant   numpy" in text and "(1, 1024, 4, 12)" in text and "; two-pass " in text and str(path) in text
    pixels = image.imread(path)
    assert pixels.shape[0] > 500 and pixels.std() > 0.1


def hide_matplotlib(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_without_matplotlib_only_png_is_written(tmp_path, capsys, monkeypatch):
    hide_matplotlib(monkeypatch)
    monkeypatch.setattr(demo, "compute", lambda *arguments: pytest.fail("computed before it refused"))
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--output", str(tmp_path / "demo.pdf")])
    assert stop.value.code == 2
    assert "cuflash[plot]" in capsys.readouterr().err


def test_bench_refuses_a_plot_without_matplotlib_before_it_measures(tmp_path, capsys, monkeypatch):
    hide_matplotlib(monkeypatch)
    monkeypatch.setattr(bench, "measure", lambda *arguments: pytest.fail("measured before it refused"))
    assert main([*bench_args(tmp_path), "--plot", str(tmp_path / "b.png")]) == 1
    assert "cuflash[plot]" in capsys.readouterr().err


def test_demo_leaves_two_pass_out_where_memory_is_short(tmp_path, capsys, monkeypatch):
    scores = 4 * 4 * 1024**2  # float32, 4 heads, 1024 tokens
    monkeypatch.setattr(demo, "two_pass_attention", lambda *a, **o: pytest.fail("two-pass attention was called"))
    monkeypatch.setattr(Place, "available_bytes", lambda self: 4 * scores - 1)
    assert main(["demo", "--size", "64", "--device", "cpu", "--output", str(tmp_path / "x.png")]) == 0
    assert "two-pass  left out: its scores, 0.0168 GB" in capsys.readouterr().out


def test_available_memory_is_some_of_what_there_is():
    assert 2**20 < available_memory() < 2**50
    assert CPU.available_bytes() > 2**20


def test_demo_draws_without_matplotlib(tmp_path, capsys, monkeypatch):
    hide_matplotlib(monkeypatch)
    path = tmp_path / "demo.png"
    assert main(["demo", "--size", "64", "--device", "cpu", "--output", str(path)]) == 0
    assert "cuflash[plot]" in capsys.readouterr().out
    pixels = read_png(path)
    assert pixels.shape == (512, 1024, 3)
    clean = np.round(demo.scene(64) * 255)
    assert np.array_equal(pixels[:256:4, 512:768:4], clean)
    assert (pixels[:256, 768:] == 255).all()


def test_demo_fails_when_the_result_is_wrong(tmp_path, capsys, monkeypatch):
    def wrong(*args, **options):
        out, lse = attention(*args, **options)
        return out * np.float32(1.001), lse

    attention = cuflash.attention
    monkeypatch.setattr(cuflash, "attention", wrong)
    assert main(["demo", "--size", "64", "--device", "cpu", "--output", str(tmp_path / "x.png")]) == 1
    assert "too far from float64" in capsys.readouterr().out


def test_demo_is_non_local_means_and_its_maps_are_the_weights():
    clean = demo.scene(32)
    noisy = np.clip(clean + np.random.default_rng(0).normal(0, 0.1, clean.shape), 0, 1)
    q, k, v = demo.tokens(noisy, "float64")
    distances = np.square(q[0, :, None, :, :-1] - k[0, None, :, :, :-1]).sum(-1)
    weights = np.exp(-distances / 2)
    weights /= weights.sum(axis=1, keepdims=True)
    expected = np.einsum("qkh,khd->qhd", weights, v[0])
    out, lse = cuflash.attention(q, k, v, scale=1.0, return_lse=True)
    np.testing.assert_allclose(out[0], expected, rtol=1e-10)
    drawn = demo._attention_map(q, k, lse, 100, 16)
    np.testing.assert_allclose(drawn.ravel(), weights[100].mean(axis=-1), rtol=1e-8, atol=1e-14)
    assert demo.psnr(demo._image(out[0].mean(axis=1)), clean) > demo.psnr(noisy, clean) + 2


@pytest.mark.parametrize("causal", [False, True])
def test_two_pass_attention_is_attention(causal):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 3, 8)) for n in (7, 9, 9))
    expected = attention_reference(q, k, v, causal=causal)
    np.testing.assert_allclose(two_pass_attention(np, q, k, v, causal=causal), expected, rtol=1e-12)


def test_peak_bytes_sees_a_temporary():
    peak = CPU.peak_bytes(lambda: float(np.ones(1_000_000).sum()))
    assert 8_000_000 <= peak < 8_200_000


def test_doctor_prints_json(store, capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["packages"]["numpy"] == np.__version__
    assert found["cache"] == {"directory": str(store), "kernels": 0, "size": "0.0 MB", "writable": True}
    assert not store.exists()
    states = {check["name"]: check["status"] for check in found["self_test"]}
    assert states["NumPy backend against float64"] == "ok"
    assert set(states.values()) <= {"ok", "skipped"} and found["warnings"] == []


@pytest.fixture(params=["a file", "below a file", "not writable"])
def unwritable(request, tmp_path, monkeypatch):
    """A cache directory that not even root can write."""
    (tmp_path / "file").write_text("")
    path = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "x", "not writable": "/proc/cuflash"}
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(path[request.param]))
    return path[request.param]


def quiet_checks(monkeypatch):
    for name in ("_check_numpy", "_check_compiler"):
        monkeypatch.setattr(doctor, name, lambda: "fine")
    monkeypatch.setattr(doctor, "_check_cuda", lambda variant: "fine")


def test_doctor_warns_of_a_cache_that_cannot_be_written(unwritable, capsys, monkeypatch):
    quiet_checks(monkeypatch)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "\n  warning  the cache cannot be written: every process compiles again\n" in text
    assert "writable       False" in text and "all is well" not in text
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["warnings"] and found["cache"]["writable"] is False


def test_doctor_leaves_nothing_in_the_cache(store, capsys, monkeypatch):
    quiet_checks(monkeypatch)
    (store / "tmp").mkdir(parents=True)
    assert main(["doctor"]) == 0
    assert list(store.rglob("*")) == [store / "tmp"]


def test_warning_of_the_cache_shows_the_line_of_the_user(unwritable):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.default_store().publish("0" * 64, b"", {})
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.skipif(gpu_problem() is None, reason="there is a GPU")
def test_doctor_says_once_why_there_is_no_gpu(store, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_check_numpy", lambda: "fine")
    monkeypatch.setattr(doctor, "_check_compiler", lambda: "fine")
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.count(gpu_problem()) == 1


def test_doctor_fails_when_a_check_fails(store, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_check_numpy", lambda: 1 / 0)
    monkeypatch.setattr(doctor, "_check_compiler", lambda: "fine")
    monkeypatch.setattr(doctor, "_check_cuda", lambda variant: "fine")
    assert main(["doctor"]) == 1
    assert "failed   NumPy backend against float64: ZeroDivisionError" in capsys.readouterr().out


def test_doctor_shows_a_broken_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert "importing it fails" in doctor.packages()["ml_dtypes"]


def test_explain_on_the_cpu_prints_json(capsys):
    assert main(["explain", "--device", "cpu", "--seqlen-q", "10", "--seqlen-k", "30", "--causal", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["variant"] == "numpy"
    assert (found["problem"]["diag_lower"], found["problem"]["diag_upper"]) == (None, 20)


def test_explain_the_gradients(capsys):
    argv = [
        "explain",
        "--backward",
        "--deterministic",
        "--device",
        "cpu",
        "--seqlen-q",
        "10",
        "--seqlen-k",
        "30",
        "--json",
    ]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["variant"] == "numpy" and found["problem"]["deterministic"] is True
    assert found["others"]["sm90"] == "runs on CUDA arrays, and cuflash never moves data between devices"


@needs_compiler
def test_explain_for_a_gpu_that_is_not_there(store, capsys):
    argv = ["explain", "--device", "sm_90", "--head-dim", "64", "--window", "100", "none", "--heads-kv", "2"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "sm_90" in text and "registers" in text and "16 heads over 2 key/value heads" in text
    assert "query i sees keys j with j - i >= -100" in text


def test_explain_and_precompile_without_a_compiler(tmp_path):
    program = """if True:
        import sys
        sys.modules.update({"cuda": None, "cupy": None})
        from cuflash.cli import main
        print("status", main(["explain", "--device", "sm_90"]), main(["precompile", "--arch", "sm_90"]))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "\nbuild     not known: needs cuda-core and NVRTC; pip install 'cuflash[cuda13]'\n" in done.stdout
    assert "\nvariant   sm90\n" in done.stdout and "flash-2" in done.stdout and "status 0 1" in done.stdout
    assert "compiling needs cuda-core and NVRTC" in done.stderr


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_87", "sm_100", "12.0"])
def test_newer_architectures_compile(store, capsys, arch):
    if jit.nvrtc_version() < "12.8":
        pytest.skip(f"NVRTC {jit.nvrtc_version()} does not know them all")
    assert main(["explain", "--device", arch, "--head-dim", "64"]) == 0
    assert "registers" in capsys.readouterr().out


def test_explain_is_status_1_when_nothing_can_run(capsys):
    assert main(["explain", "--device", "sm_80", "--dtype", "float64"]) == 1
    assert "none can run this problem" in capsys.readouterr().out


@needs_compiler
def test_precompile_of_gradients(store, capsys):
    argv = ["precompile", "--arch", "sm_80", "--head-dims", "32", "--dtypes", "float16", "--causal", "no", "--backward"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    names = [line.split()[1] for line in text.splitlines() if line.startswith("sm_80")]
    assert names == ["sm80_forward", "sm80_backward_prepare", "sm80_backward", "sm80_backward_finish"]


@needs_compiler
def test_precompile_fills_the_store(store, capsys):
    argv = ["precompile", "--arch", "sm_80", "--head-dims", "32", "--dtypes", "float16", "--causal", "yes"]
    assert main(argv) == 0
    assert "1 kernels in" in capsys.readouterr().out
    assert len(list(store.glob("??/*/kernel.cubin"))) == 1
    assert main(argv) == 0
    assert "was there" in capsys.readouterr().out
    [problem] = usual_problems((32,), ("float16",), (True,))
    [kernel] = cuflash.precompile(problem, arch="sm_80")
    assert kernel.report.from_cache and kernel.arch == "sm_80"


def bench_args(tmp_path):
    sizes = ["--seqlens", "32,64", "--tokens", "64", "--hidden", "32", "--head-dims", "16", "--rounds", "2"]
    return ["bench", "--device", "cpu", *sizes, "--json", str(tmp_path / "b.json")]


def test_bench_writes_json_and_a_plot(tmp_path, capsys, monkeypatch):
    image = pytest.importorskip("matplotlib.image")
    kept = [runner for runner in runners(CPU) if runner.name in ("cuflash numpy", "two-pass")]
    monkeypatch.setattr(bench, "runners", lambda place: kept)
    assert main([*bench_args(tmp_path), "--plot", str(tmp_path / "b.png")]) == 0
    assert "float32 D 16 seqlen 64 batch 1 heads 2 causal" in capsys.readouterr().out
    found = json.loads((tmp_path / "b.json").read_text())
    assert len(found["results"]) == 2 * 2 * 2 and all(len(row["times"]) == 2 for row in found["results"])
    row = next(r for r in found["results"] if r["ours"] and r["causal"] and r["seqlen"] == 64)
    assert row["tflops"] * row["seconds"] * 1e12 == pytest.approx(2 * 1 * 2 * 64 * 64 * 16)
    assert row["flops"] == 2 * 1 * 2 * 64 * 64 * 16
    assert row["visible_flops"] == 4 * 2 * (64 * 65 // 2) * 16
    peer = next(r for r in found["results"] if r["name"] == "two-pass" and r["causal"] and r["seqlen"] == 64)
    assert row["ratio_to_best_peer"] == pytest.approx(peer["seconds"] / row["seconds"])
    assert image.imread(tmp_path / "b.png").std() > 0.05


def test_bench_peers_agree_with_float64():
    case = bench.Case("float32", 16, 48, 2, 2, True)
    timings = bench.measure(case, runners(CPU), 1, lambda label: None, CPU)
    assert [timing.note for timing in timings if timing.failed] == []
    assert {"cuflash numpy", "two-pass"} <= {timing.name for timing in timings}


@pytest.mark.parametrize("ours", [True, False])
def test_bench_refuses_a_wrong_result(tmp_path, capsys, monkeypatch, ours):
    def prepare(q, k, v, causal):
        return lambda: cuflash.attention(q, k, v, causal=False)

    wrong = Runner("wrong", ours, prepare, np.asarray, CPU.seconds)
    monkeypatch.setattr(bench, "runners", lambda place: [wrong])
    assert main([*bench_args(tmp_path), "--causal"]) == (1 if ours else 0)
    assert "too far from float64" in capsys.readouterr().out
    assert all(row["seconds"] is None for row in json.loads((tmp_path / "b.json").read_text())["results"])
