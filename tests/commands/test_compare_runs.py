"""compare_runs.py as a user types it."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.compared_runs import BEST, DATASET, LATEST, MODEL, RunFolder, diverged_run, finished_run
from tests.support.in_process import run_here
from tests.support.isolation import ROOT, SHIPPED_RUNS
from tests.support.launch import Result


def compare(runs_dir: Path, *arguments: str, status: int = 0) -> Result:
    return run_here("compare_runs.py", "--runs-dir", runs_dir, *arguments, status=status)


def values_of(runs_dir: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """Return the cells of each run, as --json prints them."""
    said = json.loads(compare(runs_dir, *arguments, "--json").stdout)
    return {run["name"]: run["values"] for run in said["runs"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, rate, loss in (("a", 0.001, 2.5), ("b", 0.002, 2.4)):
        RunFolder(folder, name, {"learning_rate": rate}).finish().test_loss(loss)
    RunFolder(folder, "c").add_checkpoint(LATEST, "latest").train_to(0, 10)
    return folder


def test_a_table_and_verdicts_as_text_and_as_json(runs: Path) -> None:
    lines = compare(runs, "--baseline", "a").stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("a ", "b ", "c "))][:3] == ["b", "a", "c"]
    text = " ".join(lines)
    assert "Against a (1 run), by test loss on" in text
    assert "b against a: inconclusive, because training noise is unknown" in text
    assert "c: stopped, and so in no comparison" in text
    said = json.loads(compare(runs, "b", "c", "--baseline", "a", "--json", "--sort", "name").stdout)
    a, b, c = said["runs"]
    assert [each["name"] for each in (a, b, c)] == ["a", "b", "c"], "the baseline need not be named twice"
    assert a["values"]["test_loss"] == {"value": 2.5, "reported": False, "remark": ""}
    assert c["values"]["test_loss"] == {"value": None, "reported": False, "remark": "no result of test_loss.py"}
    assert c["state"] == "stopped"
    assert said["columns"]["test_loss"]["unit"] == "nats/token"
    assert said["columns"]["test_loss"]["lower_is_better"] is True
    (verdict,) = said["comparison"]["verdicts"]
    assert (verdict["arm"], verdict["verdict"]) == ("b", "inconclusive")
    assert verdict["difference"] == pytest.approx(-0.1)


def test_both_commands_agree_on_what_is_the_same_text(tmp_path: Path) -> None:
    """Both commands identify a validation text by its content. The text is the same one even if the dataset has another
    name. It is also the same one if microbatches have another size but the total number of tokens is equal."""
    same: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "a": ({}, {}),
        "renamed": ({}, {"dataset": {**DATASET, "name": "you/texts"}}),
        "split": ({"microbatch_size": 2, "validation_batches": 10}, {"microbatch_size": 2}),
    }
    others: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "half": ({"microbatch_size": 2}, {"microbatch_size": 2}),
        "later": ({"start_val_token": 16}, {}),
        "other": ({}, {"dataset": {**DATASET, "validation": {"tokens": 10_000, "sha256": "dd" * 32}}}),
    }
    for name, (settings, values) in (same | others).items():
        RunFolder(tmp_path, name, settings).finish(parameters=29_888, flops_per_token=200_000, **values)
    losses = {name: values["validation_loss"]["value"] for name, values in values_of(tmp_path).items()}
    assert losses == dict.fromkeys(same, 2.6) | dict.fromkeys(others)
    run_here("fit_scaling.py", *same, "--runs-dir", tmp_path)
    for name in others:
        fitted = run_here("fit_scaling.py", "a", name, "--runs-dir", tmp_path, status=2)
        assert "one law cannot hold for both" in fitted.stderr


def test_a_baseline_is_a_run_or_an_arm(tmp_path: Path) -> None:
    for rate, loss in ((0.001, 2.5), (0.002, 2.4)):
        for seed in (1, 2):
            finished_run(tmp_path, f"lr-{rate}-seed-{seed}", rate, seed).test_loss(loss + seed / 1000)
    for baseline in ("lr-0.001-seed-2", f"{tmp_path}/lr-0.001-seed-1", "lr-0.001"):
        said = compare(tmp_path, "--baseline", baseline).stdout
        assert "Against lr-0.001 (2 runs)" in said
        assert "lr-0.002 is better than lr-0.001 by 0.10" in " ".join(said.split())
    for baseline in ("lr-0.001-seed-2", "lr-0.001"):
        assert "Against lr-0.001 (2 runs)" in compare(tmp_path, "lr-0.002*", "--baseline", baseline).stdout
    alone = compare(tmp_path, "lr-0.00*-seed-2", "--baseline", "lr-0.001-seed-2").stdout
    assert "Against lr-0.001-seed-2 (1 run)" in alone, "if it is named among the runs, the others of its arm are not"
    diverged_run(tmp_path, "lr-0.002-seed-3", 0.002, 3)
    for baseline in ("lr-0.002-seed-2", "lr-0.002-seed-3", "lr-0.002"):
        said = " ".join(compare(tmp_path, "lr-0.001*", "--baseline", baseline).stdout.split())
        assert "lr-0.002-seed-3, of lr-0.002, diverged" in said, "it counts, although it is not named"


def test_without_names_what_was_never_trained_is_a_line_and_no_row(tmp_path: Path) -> None:
    RunFolder(tmp_path, "mine").finish().test_loss(2.5)
    RunFolder(tmp_path, "shipped", {"learning_rate": 0.1})
    line = "never trained, and not shown unless they are named: shipped"
    said = compare(tmp_path).stdout.splitlines()
    assert said[-1] == line
    assert [each for each in said if each.startswith("shipped")] == []
    as_json = compare(tmp_path, "--json")
    assert [run["name"] for run in json.loads(as_json.stdout)["runs"]] == ["mine"]
    assert as_json.stderr == f"{line}\n"
    assert "shipped  never trained" in compare(tmp_path, "mine", "shipped").stdout
    against = compare(tmp_path, "--baseline", "mine").stdout
    assert "inconclusive, because no other arm has finished" in against
    (tmp_path / "mine" / "summary.json").unlink()
    (tmp_path / "mine" / "results").rename(tmp_path / "results")
    for given in ((), ("--baseline", "shipped")):
        shown = json.loads(compare(tmp_path, "--json", *given).stdout)["runs"]
        assert [run["name"] for run in shown] == ["mine", "shipped"], "if no run was trained, all are shown"


def test_dollars_are_those_of_the_summary_or_worked_out_as_a_summarys_are(tmp_path: Path) -> None:
    price, dollars = {"price_per_hour": 0.10}, {"training": 0.0071, "validation": 0.0017, "total": 0.0101}
    RunFolder(tmp_path, "finished", price).finish(dollars=dollars)
    RunFolder(tmp_path, "stopped", price).add_checkpoint(LATEST, "latest").train_to(0, 100)
    said = values_of(tmp_path)
    shown = {name: values["dollars"]["value"] for name, values in said.items()}
    assert shown == {"finished": 0.0101, "stopped": 0.01}, "3.6 s a step"
    assert said["finished"]["dollars_without_validation"]["value"] == pytest.approx(0.0084)


def test_one_folder_with_all_that_can_be_wrong(tmp_path: Path) -> None:
    RunFolder(tmp_path, "whole").finish().test_loss(2.5).test_loss(2.4, LATEST)
    RunFolder(tmp_path, "never")
    half = RunFolder(tmp_path, "half").finish()
    half.directory.summary.write_text(half.directory.summary.read_text()[:99])
    again = RunFolder(tmp_path, "again").train_to(0, 10, 20)
    with again.directory.metrics.open("a") as file:
        file.write(again.directory.metrics.read_text().splitlines()[0] + '\n{"event": "tra')
    strange = RunFolder(tmp_path, "strange").finish()
    strange.directory.results.mkdir()
    (strange.directory.results / "test-loss.json").write_text('{"kind": "?"}')
    (strange.path / "reported.json").write_text("[]")
    said = compare(tmp_path)
    assert said.stderr == ""
    text = " ".join(said.stdout.split())
    assert "half damaged" in text
    assert "not valid JSON" in text
    assert f"of checkpoint {BEST} (best); also measured: {LATEST}" in text
    assert "not a result of this version" in text
    assert "never trained" in text


def test_numbers_and_kinds_that_cannot_be_meant(tmp_path: Path) -> None:
    """Absurd values in a run's hand-edited summary leave only that run's cells empty, and no line has more than 80
    columns."""
    odd: dict[str, dict[str, Any]] = {
        "huge": {"tokens_per_second": 1e300, "final_validation_loss": 1e300, "seconds": {"total": 1e300}},
        "endless": {"tokens_seen": 10**400, "seconds": {"total": 1e308, "training": 1e308}},
        "dear": {"train": {"price_per_hour": 1e9}, "seconds": {"total": 1e305}, "model": MODEL},
        "listed": {"dataset": {"name": 3, "train": {"sha256": [1]}, "validation": {"sha256": {"a": 1}}}},
        "kinds": {"train": {"validation_batches": 5, "microbatch_size": 5, "start_val_token": [1], "dataset": {}}},
        "many": {"world_size": 2**53 + 1},
    }
    for name, values in odd.items():
        RunFolder(tmp_path, name).finish(**values)
    RunFolder(tmp_path, "good").finish()
    RunFolder(tmp_path, "twin").finish()
    done = compare(tmp_path)
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 80
    said = values_of(tmp_path)
    assert said["good"]["validation_loss"]["value"] == 2.6
    assert said["dear"]["dollars"] == {
        "value": None,
        "reported": False,
        "remark": "computed from numbers so large that the result is not finite",
    }
    del odd["kinds"]  # damaged, as its settings are of the wrong kinds, so that no speed of it can be asked for
    lines = compare(tmp_path, *odd, "good", "--machines").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for name in (*odd, "good"):
        assert any(line.startswith(f"{name} on other machines: ") for line in lines)


HOSTILE = "\x1b[2J\nH100\r\x07\u202e\u2028 of anybody's making, and a long one, too"


def hostile_runs(folder: Path) -> None:
    """Write two runs with the files that all commands write. Every text in them contains control characters."""
    for name, other in (("a\x1b[31m\nred", ""), ("b", "2")):
        text = HOSTILE + other
        dataset = {**DATASET, "name": text}
        train = {"learning_rate": 0.001 + len(other)}
        run = RunFolder(folder, name, train)
        run.finish(device=text, torch=text, dataset=dataset).test_loss(2.5, dataset=text, precision=text)
        run.train_to(0, 10, 20)
        summary = json.loads(run.directory.summary.read_text())
        summary["train"][HOSTILE] = summary["model"]["precision"] = text
        run.directory.summary.write_text(json.dumps(summary))
        result: dict[str, Any] = dict.fromkeys(("date", "lm_eval", "precision"), HOSTILE)
        result |= {"kind": "benchmarks", "device": text, "torch": text, "tasks": [HOSTILE]}
        result["weights"] = {"checkpoint": HOSTILE, "sha256": "0"}
        result["scores"] = [{"task": HOSTILE, "metric": "acc\x1b", "value": 0.5, "higher_is_better": True}]
        (run.directory.results / "benchmarks.json").write_text(json.dumps(result))


def shown_whole(text: str, columns: int = 80) -> None:
    """Assert that a text has no control characters except line ends, and no line of more than 80 columns."""
    assert [line for line in text.split("\n") if not line.isprintable() or len(line) > columns] == []


@pytest.mark.slow
def test_no_text_of_a_file_moves_a_terminal(tmp_path: Path) -> None:
    hostile_runs(tmp_path)
    page, picture = tmp_path / "page.html", tmp_path / "picture.png"
    done = compare(tmp_path, "--baseline", "b", "--html", str(page), "--chart", str(picture))
    shown_whole(done.stdout)
    shown_whole(done.stderr, columns=1000)
    assert r"\x1b[2J\nH100" in done.stdout
    assert r"a\x1b[31m\nred" in done.stdout
    shown_whole(page.read_text(), columns=10**6)
    said = json.loads(compare(tmp_path, "--json").stdout)
    assert {run["values"]["torch"]["value"] for run in said["runs"]} == {HOSTILE, f"{HOSTILE}2"}, "unchanged in JSON"
    prices = json.loads((ROOT / "harness" / "planning" / "machines.json").read_text())
    for number, each in enumerate(prices["machines"]):
        each |= {"machine": f"{HOSTILE}{number}", "source": HOSTILE}
        each["device"] = HOSTILE if number else each["device"]
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(prices))
    for done in (
        compare(SHIPPED_RUNS, "8xa100m40", "original", "--machines", "--prices", str(path)),
        compare(tmp_path, "b", "--machines"),
    ):
        shown_whole(done.stdout)


@pytest.mark.slow
def test_a_hundred_runs_are_read_about_as_fast_as_their_files_are_parsed_four_times(tmp_path: Path) -> None:
    ended = RunFolder(tmp_path, "run-0").finish()
    going = RunFolder(tmp_path, "run-1").train_to(*range(300))
    for run in (ended, going):
        run.add_checkpoint(BEST, "best").add_checkpoint(LATEST, "latest").test_loss(2.5)
    for number in range(2, 100):
        copy = shutil.copytree((ended if number % 4 else going).path, tmp_path / f"run-{number}", symlinks=True)
        for path in (copy / "train.json", copy / "summary.json"):
            if path.exists():
                path.write_text(path.read_text().replace('"price_per_hour": 36.0', f'"price_per_hour": {number}.0'))
    taken, parsing = [], []
    for _ in range(3):  # of processor time, the least of three, because the machine may have other work
        began = time.process_time()
        lines = compare(tmp_path).stdout.splitlines()
        taken.append(time.process_time() - began)
        began = time.process_time()
        for path in [*tmp_path.rglob("*.json"), *tmp_path.rglob("*.jsonl")] * 4:
            for text in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
                json.loads(text)
        parsing.append(time.process_time() - began)
    assert min(taken) < 1.5 * min(parsing)
    assert sum(line.startswith("run-") for line in lines) >= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sort", "test_los"], "--sort test_los: no column of this table; did you mean test_loss?"),
        (["aa"], "no such run; "),
        (["--baseline", "aa"], "no such run; "),
        (["--runs-dir", "nowhere"], "nowhere: there are no runs; --runs-dir names the folder of your runs"),
        (["--machines"], "--machines: name the runs to estimate"),
        (["a", "--machines", "--json"], "--machines and --json: give one of them"),
        (["a", "--reference", "GPT-2=3.5"], "--reference belongs with --html or --chart"),
        (["a", "--html", "x.html", "--over", "hours"], "--over belongs with --chart"),
        (["a", "--chart", "x.png", "--reference", "GPT-2"], 'must be LABEL=LOSS, such as "GPT-2 small=3.500"'),
        (["a", "--chart", "x.png", *["--reference", "x=3", "--reference", " x = 4"]], 'a second line called "x"'),
        (["a", "--chart", "x.png"], "--chart: nothing to draw: "),
        (["a", "--html", "x.png", "--chart", "./x.png"], "both name x.png; give each its own file"),
        (["a", "--html", ""], ".: is a folder; name a file"),  # of --html "$PAGE", if there is no variable PAGE
        (["a", "--prices", "x"], "--prices belongs with --machines"),
        (["a", "--machines", "--prices", "nothing.json"], "nothing.json: no such file"),
    ],
)
def test_what_cannot_be_done_is_one_line(runs: Path, arguments: list[str], message: str) -> None:
    compare(runs, *arguments, status=2).refuses(message)


def test_a_chart_and_a_page_and_what_is_not_drawn(tmp_path: Path) -> None:
    for name, rate in (("a", 0.001), ("b", 0.002)):
        RunFolder(tmp_path / "runs", name, {"learning_rate": rate}).finish().train_to(0, 10, 20)
    for name in ("never", "nor"):
        RunFolder(tmp_path / "runs", name)
    RunFolder(tmp_path / "runs", "young").add_checkpoint(LATEST, "latest").train_to(0)
    picture, page = tmp_path / "curves.png", tmp_path / "page.html"
    written = ["--chart", str(picture), "--html", str(page), "--reference", "GPT-2 small=3.5", "--baseline", "a"]
    lines = compare(tmp_path / "runs", *written).stderr.splitlines()
    assert (lines[0], lines[-1]) == (f"Wrote {page}", f"Drew {picture}")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "b against a: inconclusive" in page.read_text()
    assert "The verdicts are based on" not in page.read_text(), "the curves show the loss that they are based on"
    assert max(map(len, lines[1:-1])) <= 80
    said = sorted(text.strip() for text in " ".join(map(str.strip, lines[1:-1])).split("not drawn: ")[1:])
    assert said[0] == "never, nor: in no chart: never trained"
    assert said[1].startswith("young: ")
    assert len(said) == 2, "each reason appears once"
