"""Arrows only go down (docs/design.md), heavy imports stay in their rooms, and nothing pickles."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "deltarefit"

LAYERS: dict[str, int] = {
    "errors": 0, "elements": 0, "_kernel": 0,
    "records": 1, "manifest": 1, "pieces": 1, "codec": 1, "catalogs": 1, "apart": 1, "digest": 1, "protocol": 1,
    "safetensors_layout": 1,
    "affine": 1, "signing": 1, "trust": 1, "retention": 1,
    "storekeys": 1, "relay_api": 1, "tree": 1, "addresses": 1,
    "ports": 2, "baseline": 2, "events": 2, "localfiles": 2, "exchange": 2, "tracing": 2, "pool": 2,
    "runtime": 2, "createonce": 2, "keyfiles": 2, "tls": 2, "treefiles": 2,
    "sources": 3, "targets": 3, "stores": 3,
    "notary": 2,
    "weights": 3, "landing": 3, "runlog": 3, "recent": 3,
    "pins": 3, "pruning": 3, "composition": 3, "advice": 3,
    "attendance": 3, "beginning": 3,
    "anchors": 3, "anchoring": 3, "staging": 3, "asof": 3, "pipeline": 3, "receiver": 3,
    "publisher": 3, "publishing": 3, "relay": 3,
    "cli": 4, "demo": 4, "bench": 4, "testing": 4, "doctor": 4, "compare": 4, "verify": 4, "inspection": 4,
    "simulation": 4, "ray": 4, "__main__": 4,
}  # fmt: skip
ADAPTERS = {"sources", "targets", "stores"}
PATHS = {name for name, layer in LAYERS.items() if layer == 3} - ADAPTERS
HEAVY = {
    "torch",
    "transformers",
    "obstore",
    "vllm",
    "sglang",
    "megatron",
    "gguf",
    "triton",
    "reasoning_gym",
    "aiohttp",
    "urllib3",
    "ray",
}
HEAVY_ROOMS = ADAPTERS | {"demo", "bench", "tracing", "relay", "ray"}
PURE_FORBIDDEN = {"os", "time", "logging", "socket", "pathlib", "io", "subprocess", "threading", "random", "secrets"}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    part = path.relative_to(ROOT).parts[0]
    return part.removesuffix(".py")


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def own_rooms(path: Path) -> set[str]:
    parts = {name.split(".")[1] for name in imported(path) if name.startswith("deltarefit.")}
    return {part for part in parts if part in LAYERS or (ROOT / part).exists() or (ROOT / f"{part}.py").exists()}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows_only_go_down(path: Path) -> None:
    here = room(path)
    if here == "__init__":
        return
    assert here in LAYERS, f"{here} has no layer: add it to LAYERS and to docs/design.md"
    for other in own_rooms(path) - {here}:
        assert LAYERS[other] <= LAYERS[here], f"{path.name} imports {other} above it"
        assert not (here in PATHS and other in ADAPTERS), f"{path.name} imports an adapter ({other})"
        assert not (here in ADAPTERS and other in PATHS | ADAPTERS), f"adapter {path.name} imports {other}"
        if LAYERS[here] == LAYERS[other] == 1:
            assert other != "codec" or here != "manifest"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_imports_stay_in_their_rooms(path: Path) -> None:
    heavy = {name.split(".")[0] for name in imported(path)} & HEAVY
    assert not heavy or room(path) in HEAVY_ROOMS, f"{path.name} imports {heavy}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_pickle_and_no_torch_load(path: Path) -> None:
    text = path.read_text()
    assert "pickle" not in text
    assert "torch.load" not in text
    assert "allclose" not in text


@pytest.mark.parametrize("path", [p for p in modules() if LAYERS.get(room(p)) == 1], ids=lambda p: p.name)
def test_pure_rooms_touch_no_world(path: Path) -> None:
    assert not {name.split(".")[0] for name in imported(path)} & PURE_FORBIDDEN


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_are_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400, f"{path.name} is too long"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{path.name}:{node.lineno} {node.name} is too long"


def test_import_needs_no_heavy_library() -> None:
    code = f"import sys, deltarefit; assert not set(sys.modules) & {HEAVY!r}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
