"""Compare how well models follow instructions, with confidence intervals.

    OPENAI_API_KEY=... uv run --extra judge judge_ift.py small.json medium.json large.json

Each file has the answers of one model, written by test_ift.py, by the programs of Sebastian Raschka's book, or by those
of Giles Thomas's lab notebook. If judging is stopped, the same command resumes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness.common.errors import UserError
from harness.common.options import JUDGE_PROMPT, JUDGE_PROMPT_HELP, NOTEBOOK_JUDGE, Command, FiniteNumber

SECONDS = FiniteNumber(min=0, min_open=True, max=86_400)
PRICE = FiniteNumber(min=0, max=1e9)


@click.command(cls=Command)
@click.argument("responses", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--model", default=NOTEBOOK_JUDGE, show_default=True, help="The judge.")
@click.option("--base-url", help="Another OpenAI-compatible endpoint.  [default: OPENAI_BASE_URL, or OpenAI]")
@click.option("--prompt", type=JUDGE_PROMPT, default="together", show_default=True, help=JUDGE_PROMPT_HELP)
@click.option(
    "--repeats", type=click.IntRange(1, 1000), default=1, show_default=True, help="Number of judgments of each answer."
)
@click.option(
    "--attempts",
    type=click.IntRange(1, 100),
    default=5,
    show_default=True,
    help="Ask at most this often for a valid judgment, and send each request at most this often until it is answered.",
)
@click.option(
    "--timeout", type=SECONDS, default=120.0, show_default=True, help="Seconds to wait for the answer to a request."
)
@click.option("--parallel", type=click.IntRange(1, 256), default=8, show_default=True, help="Requests at a time.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Seed of the order of answers, and of resamples.",
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path),
    help="File for the judge's answers.  [default: judgements.jsonl beside the RESPONSES file whose path sorts first; "
    "answers in a judgements.jsonl beside another RESPONSES file are used, too]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every score.")
@click.option("--price-in", type=PRICE, help="Dollars for a million tokens of prompts, to print the cost.")
@click.option("--price-out", type=PRICE, help="Dollars for a million tokens of answers, to print the cost.")
def main(
    responses: tuple[Path, ...],
    model: str,
    base_url: str | None,
    cache: Path | None,
    as_json: bool,
    price_in: float | None,
    price_out: float | None,
    **options: Any,
) -> None:
    """Compare the models whose answers are in RESPONSES (one file for each model).

    The judge sees the answers of all models to a question together, without the models' names and in shuffled order.
    The judge's API key is read from the environment variable OPENAI_API_KEY.

    With --prompt book or --prompt notebook, the judge sees each answer alone and gives an integer score. The prompt is
    exactly that of Sebastian Raschka's book, or that of Giles Thomas's lab notebook. If the judge is the same, the mean
    score can be compared with that in the book or the notebook. It cannot be compared with scores of models that were
    judged together.

    If test_ift.py wrote the responses to a run's folder, and the checkpoint that gave the answers still exists, the
    scores are also written to that run's results/.
    """
    from harness.evaluation.instruct.responses import read_comparable
    from harness.evaluation.judge.report import judge_and_report
    from harness.evaluation.judge.requests import JudgeSettings

    if (price_in is None) != (price_out is None):
        raise UserError("--price-in and --price-out: give both or neither")
    prices = None if price_in is None or price_out is None else (price_in, price_out)
    settings = JudgeSettings.choose(model, base_url, **options)
    models = read_comparable(responses)
    beside = dict.fromkeys(path.parent / "judgements.jsonl" for path in sorted(map(Path.absolute, responses)))
    judge_and_report(responses, models, settings, [cache] if cache else [*beside], prices=prices, as_json=as_json)


if __name__ == "__main__":
    main()
