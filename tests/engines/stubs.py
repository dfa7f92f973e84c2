"""Stand-ins for the compiled packages that SGLang imports and a CPU run never calls.

    python tests/engines/stubs.py SITE_PACKAGES

SGLang imports sgl_kernel (its CUDA kernels), cutlass, torchaudio and torchvision when it starts. None of them works
beside a CPU build of torch, and serving text on a CPU uses nothing of them. Each stand-in lets the import pass. A
function of ``FUNCTIONS`` that is called all the same raises and says so; a name of ``CLASSES`` is an empty class,
because SGLang and transformers test values against such classes. A real package is never overwritten.
"""

from __future__ import annotations

import sys
from pathlib import Path

FUNCTIONS = '''"""Stand-in: importable on a CPU, not callable."""

__version__ = "0.0"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*arguments, **options):
        raise RuntimeError(f"{__name__}.{name} is a stand-in for tests on a CPU and must not be called")

    return absent
'''
CLASSES = '''"""Stand-in: importable on a CPU; every name is an empty class."""

__version__ = "0.0"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
'''
# transformers reads the members when it is imported.
MODES = """

class InterpolationMode:
    NEAREST = BILINEAR = BICUBIC = LANCZOS = BOX = HAMMING = NEAREST_EXACT = 0
"""
FILES = {
    "sgl_kernel/__init__.py": FUNCTIONS,
    "cutlass/__init__.py": FUNCTIONS,
    "torchaudio/__init__.py": FUNCTIONS,
    "torchaudio/functional.py": FUNCTIONS,
    "torchvision/__init__.py": CLASSES,
    "torchvision/io.py": CLASSES,
    "torchvision/transforms/__init__.py": CLASSES + MODES,
    "torchvision/transforms/functional.py": CLASSES,
    "torchvision/transforms/v2/__init__.py": CLASSES,
    "torchvision/transforms/v2/functional.py": CLASSES,
}


def write(site_packages: Path) -> None:
    """Put the stand-ins into ``site_packages``. Raises ``FileExistsError`` where a real package is installed."""
    for package in sorted({name.split("/")[0] for name in FILES}):
        init = site_packages / package / "__init__.py"
        if init.is_file() and "Stand-in" not in init.read_text():
            raise FileExistsError(f"{init.parent}: a real package; a stand-in belongs only where there is none")
    for name, text in FILES.items():
        path = site_packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
