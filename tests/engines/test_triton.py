"""The Triton kernel as far as a machine without a GPU can tell: interpreted, and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from deltarefit.targets.placing.device import scatter_for
from deltarefit.targets.placing.scatter import TorchScatter
from deltarefit.targets.placing.triton_scatter import TritonScatter

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **settings: str) -> str:
    """What another Python says, which must succeed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_kernel_is_bit_exact_in_the_interpreter() -> None:
    said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/engines/triton_checks.py", TRITON_INTERPRET="1")
    assert " passed" in said
    assert "skipped" not in said


COMPILE = """
import itertools
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from deltarefit.targets.placing.triton_scatter import _touch

names = {1: "*u8", 2: "*i16", 4: "*i32", 8: "*i64"}
kinds = [(False, True), (False, False), (True, False)]
for (width, shift), (every, valued) in itertools.product([(1, 0), (2, 0), (4, 0), (8, 0), (2, 16)], kinds):
    values, storage = names[width if valued else 8], names[4 if shift else width]
    mask = (1 << 8 * width) - 1 if width < 8 else -1
    constants = dict(dims=6, shift=shift, mask=mask, low=(1 << shift) - 1, every=every)
    constants |= dict(valued=valued, block=1024)
    types = dict(tasks="*i64", rows="*i64", positions="*i64", values=values, storage=storage, parts="*i64")
    types |= dict(columns="i32", operation="i32", write="i32", **dict.fromkeys(constants, "constexpr"))
    source = ASTSource(fn=_touch, signature=types, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
    print("compiled")
"""


def test_the_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """To machine code, which takes no GPU: the interpreter takes more than the compiler does."""
    said = run("-c", COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert said.count("compiled") == 15


def test_cuda_takes_the_kernel_and_the_cpu_does_not() -> None:
    assert scatter_for(torch.device("cuda")) is TritonScatter
    assert scatter_for(torch.device("cpu")) is TorchScatter
