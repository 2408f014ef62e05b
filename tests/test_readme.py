"""The README's examples run as they stand, its commands parse and its links lead somewhere."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from cuflash.cli import main
from cuflash.measure import gpu_problem

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def first_line_about(block):
    return next(line for line in block.splitlines() if line.startswith(("import", "#")))


@pytest.mark.parametrize("block", BLOCKS, ids=first_line_about)
def test_python_block_runs(block):
    for framework in ("torch", "jax", "cupy"):
        if f"import {framework}\n" in block:
            pytest.importorskip(framework)
    if "needs a GPU" in block and gpu_problem():
        pytest.skip(gpu_problem())
    exec(compile(block, "README.md", "exec"), {})


def test_there_is_an_example_for_each_framework():
    for framework in ("numpy as np", "torch", "jax", "cupy"):
        assert any(f"import {framework}\n" in block for block in BLOCKS), framework


def test_commands_parse():
    lines = re.findall(r"^python -m cuflash (.*)$", README, re.MULTILINE)
    assert {line.split()[0] for line in lines} >= {"demo", "explain"}
    for line in lines:
        with pytest.raises(SystemExit) as stop:
            main([*line.split(), "--help"])
        assert stop.value.code == 0


def stable(text):
    """Without the numbers that depend on the compiler's version and the machine."""
    return re.sub(r"(registers|spill_bytes|compile_seconds) [\d.]+(, cached)?", r"\1 ?", text)


def test_explain_sample_is_what_it_prints(tmp_path):
    if not (find_spec("cuda") and find_spec("cuda.core")):
        pytest.skip("cuda-core, the compiler's front, is not installed")
    [(command, sample)] = re.findall(
        r"^```sh\npython (-m cuflash explain .*)\n```\n\n```text\n(.*?)^```", README, re.M | re.S
    )
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert stable(done.stdout) == stable(sample)


def test_links_to_files_and_headings_lead_somewhere():
    headings = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", README, re.M)}
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif "://" not in target:
            assert (ROOT / target).is_file(), target
