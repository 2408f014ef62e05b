"""The README's examples run as they stand, its commands parse and its links lead somewhere."""

import re
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


def test_links_to_files_and_headings_lead_somewhere():
    headings = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", README, re.M)}
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif "://" not in target:
            assert (ROOT / target).is_file(), target
