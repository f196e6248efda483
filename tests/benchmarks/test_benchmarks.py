"""`make bench`: its cases are real commands, their lines have what the page shows, and noise is no news."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from mpi4dl_nb.benchmarks import __main__ as command
from mpi4dl_nb.benchmarks.cases import STUDIES, BenchmarkCase, BenchmarkStudy
from mpi4dl_nb.benchmarks.comparison import show_growth
from mpi4dl_nb.benchmarks.results import (
    BenchmarkResults,
    BenchmarkRow,
    build_page,
    find_changes,
    measure_studies,
    run_case,
)
from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.errors import PlanError, RankError

PLANNED = [case for study in STUDIES for case in study.cases if case.arguments[1] in ("step", "memory")]
SMALL = {
    "step": ("--image-size", "64", "--iterations", "2"),
    "memory": ("--image-size", "64"),
    "streaming": ("--image-size", "64", "--iterations", "1", "--memory-mb", "400", "--slice-method", "2x1"),
    "largest": ("--image-size", "128", "--memory-mb", "400", "--most-px", "256"),
    "halo": ("--image-size", "64", "--iterations", "2", "--warmup", "1"),
    "allreduce": ("--max-bytes", "64", "--iterations", "2"),
    "overhead": ("--iterations", "1"),
}


def make_small_study(study: BenchmarkStudy) -> BenchmarkStudy:
    """Its last case, made short."""
    case = study.cases[-1]
    return replace(study, cases=(replace(case, arguments=(*case.arguments, *SMALL[case.arguments[1]])),))


def list_studies_by_command() -> dict[str, BenchmarkStudy]:
    """One study of each command."""
    return {study.cases[-1].arguments[1]: study for study in STUDIES}


@pytest.mark.parametrize("case", PLANNED, ids=lambda case: case.name)
def test_the_plan_of_a_case_is_for_its_ranks(case: BenchmarkCase):
    flags = options.make_parser("", iterations=5)
    flags.add_argument("--memory-mb")  # of `bench memory`
    chosen = flags.parse_args(case.arguments[2:])
    assert options.make_plan(chosen).ranks == case.ranks
    numbers = {part for argument in case.arguments for part in argument.split("x")}
    assert case.at is None or str(case.at) in {*numbers, str(case.ranks)}


def test_titles_and_names_are_unique():
    titles = [study.title for study in STUDIES]
    assert len(set(titles)) == len(titles)
    for study in STUDIES:
        assert study.ratio in study.columns or study.cases[0].arguments[1] == "halo"
        assert len({case.name for case in study.cases}) == len(study.cases)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", SMALL)
def test_real_lines_have_what_the_page_shows(kind: str, tmp_path, capsys):
    study = make_small_study(list_studies_by_command()[kind])
    found = measure_studies([study])
    rows = found.rows[study.title]
    assert rows
    assert all(row.get_number(column) >= 0 for row in rows for column in (*study.columns, study.ratio))
    text = build_page([study], found, {}, None)
    assert study.says in text
    assert text.count("\n| ") == 1 + len(rows)
    found.save(tmp_path / "found.json")
    assert BenchmarkResults.load(tmp_path / "found.json").rows[study.title] == rows
    if study.grows:
        assert all(row.name in show_growth(study, rows).alt for row in rows)
    capsys.readouterr()


def make_results(ratio: float, spread: float = 0.0) -> BenchmarkResults:
    return BenchmarkResults({}, {"More ranks": [BenchmarkRow("2 ranks", 2, {"ratio": ratio, "spread": spread})]})


@pytest.mark.parametrize(
    ("before", "now", "spread", "told"),
    [
        (1.0, 1.05, 0.0, []),
        (1.0, 1.3, 0.4, []),
        (1.0, 1.3, 0.2, ["better"]),
        (1.0, 0.7, 0.2, ["worse"]),
    ],
)
def test_what_is_more_than_noise_is_reported(before: float, now: float, spread: float, told: list[str]):
    study = next(study for study in STUDIES if study.title == "More ranks")
    found = list(find_changes([study], make_results(before), make_results(now, spread)))
    assert [re.search("better|worse", text)[0] for text in found] == told
    less = replace(study, more_is_better=False)
    opposite = {"better": "worse", "worse": "better"}
    found = list(find_changes([less], make_results(before), make_results(now, spread)))
    assert [re.search("better|worse", text)[0] for text in found] == [opposite[word] for word in told]


def make_line(case: BenchmarkCase) -> list[dict[str, object]]:
    """As `bench step` prints it."""
    share = dict.fromkeys(("forward", "backward", "messages", "sums", "update"), 0.1) | {"waiting": 0.5}
    rates = {"images_per_s": 2.0, "one_process_images_per_s": 1.0, "ratio": 2.0 * case.ranks, "of_limit": 0.5}
    return [rates | {"spread": 0.1, "threads": 2, "phases": share}]


def test_the_command_writes_a_page_and_then_tells_what_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "measure_studies", lambda studies: measure_studies(studies, make_line))
    asked = ["--folder", str(tmp_path), "--only", "More ranks"]
    assert command.main(asked) == 0
    text = (tmp_path / "BENCHMARKS.md").read_text()
    assert "There were no figures before." in text
    assert "| 8 ranks | 2.00 | 1.00 | 16.0 | 0.5 | 10% |" in text
    assert (tmp_path / "figures/more_ranks.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((tmp_path / "benchmarks.json").read_text())
    kept["rows"]["More ranks"][0]["line"]["ratio"] = 4.0
    (tmp_path / "benchmarks.json").write_text(json.dumps(kept))
    capsys.readouterr()
    assert command.main(asked) == 0
    assert "More ranks, 1 rank: worse, 2.000 after 4.000 (noise 10%)." in capsys.readouterr().out
    assert "- More ranks, 1 rank: worse" in (tmp_path / "BENCHMARKS.md").read_text()


def test_what_fails_is_reported_and_the_rest_is_kept(tmp_path, monkeypatch, capsys):
    def fail_on_four_ranks(case):
        if case.ranks == 4:
            raise RankError("`bench step` on 4 ranks ended with 2: PlanError: no.")
        return make_line(case)

    monkeypatch.setattr(command, "measure_studies", lambda studies: measure_studies(studies, fail_on_four_ranks))
    assert command.main(["--folder", str(tmp_path), "--only", "More ranks"]) == 1
    assert "`bench step` on 4 ranks ended with 2: PlanError: no." in capsys.readouterr().out
    text = (tmp_path / "BENCHMARKS.md").read_text()
    assert "- `bench step` on 4 ranks ended with 2" in text
    assert "| 4 ranks |" not in text
    assert "| 8 ranks |" in text


def test_a_study_that_is_not_there_is_named(tmp_path, capsys):
    assert command.main(["--folder", str(tmp_path), "--only", "Less"]) == 2
    assert "No study begins with Less. There are Against one process," in capsys.readouterr().err


def test_figures_that_are_none_are_refused(tmp_path):
    path = tmp_path / "benchmarks.json"
    path.write_text("[1]")
    with pytest.raises(PlanError, match="holds no figures"):
        BenchmarkResults.load(path)


@pytest.mark.nightly
def test_a_command_that_fails_says_why():
    with pytest.raises(RankError, match="ended with 2: PlanError: The plan needs 4 ranks"):
        run_case(BenchmarkCase("", 2, ("bench", "halo", "--num-spatial-parts", "4")))
