"""A judgement for people, at 80 columns, and the same as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.common.errors import printable
from harness.common.messages import abbreviated
from harness.common.statistics import Estimate
from harness.evaluation.judge.alone import WORDINGS
from harness.evaluation.judge.judging import Judgement, Tokens
from harness.evaluation.judge.requests import JudgeSettings
from harness.evaluation.judge.statistics import Comparison, Pair, compare

COLUMNS = 80
LABEL_INDENT = 32
MOST_FOR_ALL_PAIRS = 8  # models; of more, only neighbours in the ranking are printed


@dataclass(frozen=True)
class Prices:
    """Dollars for a million tokens of the prompt and of the answer."""

    prompt: float
    completion: float

    def dollars(self, tokens: Tokens) -> float:
        return (tokens.prompt * self.prompt + tokens.completion * self.completion) / 1e6


@dataclass(frozen=True)
class JudgeReport:
    """Report of a judgement. `comparison` is None if no question was answered."""

    judgement: Judgement
    settings: JudgeSettings
    prices: Prices | None
    comparison: Comparison | None

    @classmethod
    def of(cls, judgement: Judgement, settings: JudgeSettings, prices: Prices | None = None) -> JudgeReport:
        return cls(judgement, settings, prices, compare(judgement.scores, settings.seed))

    def lines(self) -> Iterator[str]:
        """Yield the report's lines for a terminal."""
        if self.comparison is not None:
            yield from textwrap.wrap(self._heading(self.comparison), COLUMNS)
            yield ""
            yield from self._means(self.comparison)
            if self.comparison.pairs:
                yield ""
                yield from _pairs(self.comparison)
            yield ""
            yield from self._scope()
        for cost in self._costs():
            yield from textwrap.wrap(cost, COLUMNS, subsequent_indent="  ")

    def as_json(self) -> dict[str, Any]:
        """The report as JSON, with the scores by model and question; null where the judge gave no valid answer."""
        judgement, labels = self.judgement, self.judgement.labels
        scores = [
            [[None if score != score else score for score in row] for row in rows] for rows in _by_model(judgement)
        ]
        tokens = {"this_run": self._tokens(judgement.spent_now), "all_answers": self._tokens(judgement.spent)}
        result: dict[str, Any] = {
            "judge": {"model": self.settings.endpoint.model, "base_url": self.settings.endpoint.base_url},
            "prompt": self.settings.prompt,
            "questions": len(judgement.scores),
            "repeats": self.settings.repeats,
            "seed": self.settings.seed,
            "unanswered": [asdict(each) for each in judgement.unanswered],
            "tokens": tokens,
            "models": [{"model": label, "scores": rows} for label, rows in zip(labels, scores, strict=True)],
            "pairs": [],
        }
        if self.comparison is not None:
            result["questions_compared"] = self.comparison.questions
            result["pairs"] = [_pair_json(pair, labels, self.comparison.questions) for pair in self.comparison.pairs]
            for model, mean in zip(result["models"], self.comparison.means, strict=True):
                model["mean"] = asdict(mean)
        return result

    def shortfall(self) -> str | None:
        """One line if the judge gave no valid answer somewhere."""
        missing = self.judgement.unanswered
        if not missing:
            return None
        prompts = 1 if self.settings.judges_together else len(self.judgement.labels)
        asked = len(self.judgement.scores) * self.settings.repeats * prompts
        where = abbreviated([str(number) for number in dict.fromkeys(each.question for each in missing)])
        return (
            f"{self.settings.endpoint.name}: no valid answer to {len(missing):,} of {asked:,} prompts, after "
            f"{self.settings.attempts} attempts each (question {where}; the last one: {missing[-1].reason}); "
            "judging again asks for these alone"
        )

    def _heading(self, comparison: Comparison) -> str:
        repeats = self.settings.repeats
        times = f", {repeats} times each" if repeats > 1 else ""
        together = " all models in one prompt" if len(comparison.means) > 1 else " the model"
        if not self.settings.judges_together:
            together = f" each answer alone, by {WORDINGS[self.settings.prompt].owner}'s prompt"
        asked = len(self.judgement.scores)
        some = f" of {asked:,}" if comparison.questions < asked else ""
        judge = f"{printable(self.settings.endpoint.model)} judged{together}"
        return f"{judge}; {comparison.questions:,}{some} questions{times}. Scores from 0 to 100:"

    def _scope(self) -> Iterator[str]:
        """Yield lines that say which other means these compare with."""
        if not self.settings.judges_together:
            owner = WORDINGS[self.settings.prompt].owner
            text = f"These means compare with {owner}'s by the same judge, not with those of models judged together."
            yield from [*textwrap.wrap(text, COLUMNS), ""]

    def _means(self, comparison: Comparison) -> Iterator[str]:
        yield f"{'#':>4}  {'mean':>6}  {'95 % interval':<16}  model"
        for place, model in enumerate(comparison.ranking, start=1):
            mean = comparison.means[model]
            label = printable(self.judgement.labels[model])
            first, *others = textwrap.wrap(label, COLUMNS - LABEL_INDENT, break_on_hyphens=False) or [""]
            yield f"{place:>4}  {mean.value:>6.2f}  {_interval(mean, '{:.2f}'):<16}  {first}".rstrip()
            yield from (" " * LABEL_INDENT + other for other in others)

    def _costs(self) -> Iterator[str]:
        now, ever = self.judgement.spent_now, self.judgement.spent
        yield self._cost("Tokens" if now == ever else "Tokens in this run", now)
        if now != ever:
            yield self._cost("Tokens for all answers", ever)

    def _cost(self, what: str, tokens: Tokens) -> str:
        text = f"{what}: {tokens.prompt:,} of prompts, {tokens.completion:,} of answers"
        if self.prices is not None:
            text += f", ${self.prices.dollars(tokens):,.4f}"
        if tokens.uncounted:
            text += f" ({tokens.uncounted:,} of the answers came without a count)"
        return text

    def _tokens(self, tokens: Tokens) -> dict[str, Any]:
        price = {} if self.prices is None else {"dollars": self.prices.dollars(tokens)}
        return asdict(tokens) | price


def _by_model(judgement: Judgement) -> Any:
    """MxQxR lists."""
    return judgement.scores.transpose(2, 0, 1).tolist()


def _pairs(comparison: Comparison) -> Iterator[str]:
    places = {model: place for place, model in enumerate(comparison.ranking, start=1)}
    pairs: Sequence[Pair] = comparison.pairs
    if len(comparison.ranking) > MOST_FOR_ALL_PAIRS:
        pairs = [pair for pair in pairs if places[pair.second] - places[pair.first] == 1]
        yield "Neighbours (--json has all pairs):"
    yield f"{'pair':>9}  {'wins':>7}  {'difference':>10}  95 % interval"
    for pair in pairs:
        yield (
            f"{places[pair.first]:>4} :{places[pair.second]:>3}  {100 * pair.win_rate:>5.1f} %  "
            f"{pair.difference.value:>+10.2f}  {_interval(pair.difference, '{:+.2f}')}"
        )
    yield f"wins: of {comparison.questions:,} questions, where the first scores higher; a tie is half a win"


def _interval(estimate: Estimate, form: str) -> str:
    return f"[{form.format(estimate.low)}, {form.format(estimate.high)}]"


def _pair_json(pair: Pair, labels: Sequence[str], questions: int) -> dict[str, Any]:
    return {
        "first": labels[pair.first],
        "second": labels[pair.second],
        "win_rate": pair.win_rate,
        "difference": asdict(pair.difference),
        "questions": questions,
    }
