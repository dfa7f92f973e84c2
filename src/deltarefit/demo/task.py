"""A verifiable task: integer arithmetic with one right answer; the same problems for a seed everywhere."""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_INTEGER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Problem:
    """A question and its only right answer; the prompt ends where the answer begins."""

    prompt: str
    answer: str

    def reward(self, completion: str) -> float:
        """1.0 if the first integer in ``completion`` is the answer, else 0.0."""
        found = _INTEGER.search(completion)
        return float(found is not None and int(found.group()) == int(self.answer))


@dataclass(frozen=True)
class Sample:
    """A text to learn from; a positive ``advantage`` makes ``completion`` likelier, a negative one rarer."""

    prompt: str
    completion: str
    advantage: float = 1.0


def problems(seed: int, batch: int, count: int = 8) -> list[Problem]:
    """``count`` problems of batch number ``batch``; batches of one seed are independent of each other."""
    # A string seed is hashed with SHA-512 by random.seed: stable over Python versions and processes.
    generator = random.Random(f"deltarefit-task/{seed}/{batch}")  # noqa: S311  (problems, not secrets)
    return [_problem(generator) for _ in range(count)]


def _problem(generator: random.Random) -> Problem:
    sign = generator.choice("++-*")
    top = 12 if sign == "*" else 99
    left, right = generator.randint(2, top), generator.randint(2, top)
    answer = _OPERATIONS[sign](left, right)
    return Problem(f"Question: What is {left} {sign} {right}?\nAnswer:", f" {answer}")


def solved(given: Sequence[Problem]) -> list[Sample]:
    """The right answers as samples: supervised learning."""
    return [Sample(problem.prompt, problem.answer) for problem in given]


def graded(given: Sequence[Problem], completions: Sequence[str]) -> list[Sample]:
    """Completions that a policy wrote, with advantage reward minus mean reward: a policy-gradient batch.

    If all are right or all are wrong every advantage is 0, and the gradient too.
    """
    rewards = [problem.reward(text) for problem, text in zip(given, completions, strict=True)]
    mean = sum(rewards) / max(len(rewards), 1)
    triples = zip(given, completions, rewards, strict=True)
    return [Sample(problem.prompt, text, reward - mean) for problem, text, reward in triples]
