"""FlashAttention-3 out of the dew-flash-attn-cu13 wheel, without its 340 MB of FlashAttention-2.

    pip download --no-deps --only-binary=:all: -d wheels dew-flash-attn-cu13
    python benchmarks/fa3_alone.py wheels/dew_flash_attn_cu13-*.whl FOLDER      # 18 MB; then put FOLDER on PYTHONPATH

For machines that a large package cannot be brought to. Only the calls that go to FlashAttention-3 work.
"""

from __future__ import annotations

import argparse
import re
import zipfile
from pathlib import Path

PACKAGE = "dew_flash_attn"


def main() -> None:
    """Extract and adapt the package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    with zipfile.ZipFile(args.wheel) as wheel:
        for name in ("__init__.py", "libdew_flash_attn3.so"):
            wheel.extract(f"{PACKAGE}/{name}", args.folder)
    init = args.folder / PACKAGE / "__init__.py"
    text = init.read_text()
    changes = (
        (r'_library, _two = _load\("libdew_flash_attn\.so", "dew_flash_architectures"\)', "_library, _two = None, ()"),
        (r'\(\(_library, "dew_flash_mha"\), \(_library3, "dew_flash3_mha"\)\)', '((_library3, "dew_flash3_mha"),)'),
    )
    for pattern, replacement in changes:
        text, count = re.subn(pattern, replacement, text)
        if count != 1:
            raise SystemExit(f"{init} is not as expected: {pattern!r} occurs {count} times, not once")
    init.write_text(text)
    print(f"{args.folder}: put it on PYTHONPATH")


if __name__ == "__main__":
    main()
