"""The kernel's own tests once more, on a build with AddressSanitizer and UndefinedBehaviorSanitizer.

The build is kept in ``build/sanitized`` and only redone where sources changed; hypothesis tries fewer examples.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "deltarefit" / "_kernel"
BUILD = ROOT / "build" / f"sanitized-{sys.implementation.cache_tag}"
TESTS = [
    "tests/test_kernel.py",
    "tests/test_kernel_malformed.py",
    "tests/test_kernel_pieces.py",
    "tests/test_kernel_placed.py",
]


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Output of a command that must succeed within the deadline."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=240, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def _tool(name: str) -> str:
    """A build tool of this environment, or of the system."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def _runtime() -> str:
    """What to preload: AddressSanitizer of the compiler, and libstdc++, in which it looks for exceptions."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no g++")
    names = ("libasan.so", "libstdc++.so")
    found = [_run([compiler, f"-print-file-name={name}"]).strip() for name in names]
    if not all(Path(path).is_file() for path in found):
        pytest.skip("the compiler has no libasan.so")
    return " ".join(found)


def _build() -> Path:
    options = ["-DDELTAREFIT_SANITIZE=address,undefined", f"-DPython_EXECUTABLE={sys.executable}"]
    _run([_tool("cmake"), "-S", str(SOURCES), "-B", str(BUILD), "-G", "Ninja", *options])
    _run([_tool("cmake"), "--build", str(BUILD)])
    (module,) = BUILD.glob("_native*.so")
    return module


@pytest.mark.slow
def test_no_sanitizer_complains() -> None:
    environment = {
        **os.environ,
        "KERNEL_MODULE": str(_build()),
        "KERNEL_EXAMPLES": "15",
        "LD_PRELOAD": _runtime(),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-m", "not slow", *TESTS]
    assert "passed" in _run(pytest_command, environment)
