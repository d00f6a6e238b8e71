import csv
import io
import re
import shutil
import subprocess
import time

import pytest

import fabricated
import folders
from calmatch.bench import BenchOptions, choose_cells, figures, split_paper
from calmatch.bench.paper import PARTS, PUBLISHED_TABLES, SUITES, suite_cells
from calmatch.bench.render import Entry, latex, markdown
from calmatch.bench.tables import (
    build_tables,
    details_table,
    difference_table,
    gather_runs,
    grid_table,
    protocol_table,
    published_tables,
    rank_table,
    seed_values,
    selected_on_test,
)
from calmatch.cli import main
from calmatch.training.config import Config


@pytest.fixture
def make(tmp_path):
    """Runs of the main suite with chosen numbers."""

    def make(rows=("fixmatch", "fixmatch + margin"), columns=("eurosat_40",), seeds=(0, 1, 2)):
        for cell in suite_cells("main", seeds):
            if cell.row in rows and cell.column in columns:
                error = 0.10 - 0.02 * ("margin" in cell.row) + 0.01 * cell.seed
                fabricated.run(tmp_path / cell.folder, cell.config, error=error)
        return tmp_path

    return make


def text(table):
    return [[entry.text for entry in row] for row in table.rows]


def test_runs_that_differ_only_in_seeds_are_one_row(make):
    table = gather_runs([make()])
    assert table.rows == ["fixmatch", "fixmatch + margin"]
    assert table.columns == ["eurosat_40"]
    assert [sorted(group.runs) for group in table.groups] == [[(0, 0), (1, 1), (2, 2)]] * 2


def test_means_arrows_and_marks(make):
    table = details_table(gather_runs([make()]), "eurosat_40")
    assert table.rows[0][1] == Entry("11.00 ± 1.00", "second")
    assert table.rows[1][1] == Entry("9.00 ± 1.00 ↓", "best")
    assert table.rows[1][2].text == "5.00 ± 0.00"  # no arrow where nothing changed


def test_any_folders_work_and_settings_that_differ_stand_in_the_name(tmp_path):
    for steps in (100, 200):
        for seed in (0, 1):
            config = Config(steps=steps, seed=seed, method="my.Method(a=1)")
            fabricated.run(tmp_path / f"{steps}-{seed}", config)
    table = gather_runs([tmp_path])
    assert table.rows == ["my.Method(a=1) (steps=100)", "my.Method(a=1) (steps=200)"]
    assert table.columns == ["digits_40"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"protocol": "paper"}, "protocol=paper (weights chosen on the TEST set)"),
        ({"steps": 20}, "steps=20"),
        ({"net": "wrn_28_2"}, "net=wrn_28_2"),
    ],
)
def test_a_row_is_the_suites_row_whatever_flags_changed(tmp_path, changes, said):
    options = BenchOptions("main", tmp_path, seeds=(0, 1), only="eurosat,stl10", **changes)
    for cell in choose_cells(options):
        fabricated.run(tmp_path / cell.folder, cell.config)
    plain = [cell for cell in suite_cells("main", [0]) if not cell.column.startswith("cifar")]
    for suite in ("main", None):
        table = gather_runs([tmp_path], suite)
        assert table.rows == list(dict.fromkeys(cell.row for cell in plain))
        assert table.columns == list(dict.fromkeys(cell.column for cell in plain))
        assert any(said in note for note in table.notes)
        ranked = [row[0] for row in text(rank_table(table))]
        assert len(ranked) == 10  # the paper's own
        assert sum("margin" in row for row in ranked) == 3
        error, _ = published_tables(table, "main")
        assert len(error.rows) == 3 * 11  # ours in both protocols, and theirs
    assert any(
        "Not run yet: supervised on cifar100_200" in n
        for n in gather_runs([tmp_path], "main").notes
    )


def test_the_same_row_with_two_lengths_is_told_apart(tmp_path):
    for steps in (20, None):
        options = BenchOptions("main", tmp_path, seeds=(0,), only="eurosat_40 fix", steps=steps)
        options.only = "eurosat_40/fixmatch/"
        for cell in choose_cells(options):
            fabricated.run(tmp_path / str(steps) / cell.folder, cell.config)
    assert gather_runs([tmp_path]).rows == ["fixmatch (steps=20)", "fixmatch (steps=204800)"]


# two rows make no radar plot, nor do eleven; the figure of all classes takes a minute a suite
LEFT_OUT = {(name, "radar") for name in ("simmatch", "main", "supplement", "where")}
LEFT_OUT |= {(name, "logits_all") for name in PARTS if name != "losses"}


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["held-out", "paper"])
def test_all_tables_and_figures_of_the_paper_come_from_its_runs(tmp_path, protocol):
    for cell in choose_cells(BenchOptions("paper", tmp_path, seeds=(0, 1), protocol=protocol)):
        folder = fabricated.run(tmp_path / cell.folder, cell.config)
        fabricated.history(folder, seed=cell.seed)
    parts = split_paper([tmp_path], "paper")
    assert list(parts) == PARTS
    drawn = set()
    for name, table in parts.items():
        cells = suite_cells(name, [0])
        grid = grid_table(table, "error")
        assert grid.heads[1:] == list(dict.fromkeys(cell.column for cell in cells))
        assert [row[0] for row in text(grid)] == list(dict.fromkeys(cell.row for cell in cells))
        assert all("–" not in row for row in text(grid))
        shown = {}
        for part in published_tables(table, name):
            rows = iter(text(part))
            for ours, _, theirs in zip(rows, rows, rows, strict=True):
                for column, entry in zip(part.heads[1:], theirs[1:], strict=True):
                    shown[part.title.split()[0], ours[0], column] = entry
        heads = {"error": "error", "ece": "ECE", "classwise_ece": "CECE", "adaptive_ece": "AECE"}
        for (row, column, metric), number in PUBLISHED_TABLES[name].items():
            assert shown[heads[metric], row, column].startswith(f"{number.value:.2f}")
        for figure, stem, some in figures.figures_of(table):
            first = figures.FIGURES[figure].whole or stem.endswith(table.columns[0])
            if first and (name, figure) not in LEFT_OUT:
                figures.draw_figure(figure, figures.FIGURES[figure].prepare(some))
                drawn.add((name, figure))
    wanted = {(name, figure) for name in PARTS for figure in figures.FIGURES}
    assert drawn == wanted - LEFT_OUT
    grid = figures.prepare_reliability(parts["losses"])["panels"]  # as the paper has it: a grid
    assert sorted(panel["place"] for panel in grid) == [[k, j] for k in range(6) for j in range(4)]


def test_rows_and_columns_keep_their_places_whatever_is_missing(tmp_path):
    for cell in suite_cells("main", [0]):
        if (cell.row, cell.column) != ("mixmatch", "cifar100_200"):
            fabricated.run(tmp_path / cell.folder, cell.config)
    table = gather_runs([tmp_path], "main")
    assert table.rows == list(SUITES["main"]["rows"])
    assert table.columns == list(SUITES["main"]["columns"])
    parts = split_paper([tmp_path], "paper")
    assert list(parts) == ["main", "supplement", "bam", "where", "losses"]
    notes = parts["main"].notes
    assert notes == ["Not run yet: mixmatch on cifar100_200.", "No run yet of simmatch, longtail."]
    fabricated.run(tmp_path / "stranger", Config())
    notes = split_paper([tmp_path], "paper")["main"].notes
    assert "Not of the suite paper and left out: 1 runs." in notes


def test_an_unknown_network_is_refused_before_any_run(tmp_path):
    for net, said in (("bogus", "There is no net called 'bogus'"), ("small(", "is not a spec")):
        with pytest.raises(ValueError, match=said):
            choose_cells(BenchOptions("main", tmp_path, net=net))


def test_rows_that_are_told_apart_are_still_the_papers(tmp_path):
    for steps in (20, None):
        for cell in choose_cells(BenchOptions("main", tmp_path, seeds=(0,), steps=steps)):
            if cell.column == "eurosat_40":
                fabricated.run(tmp_path / str(steps) / cell.folder, cell.config)
    table = gather_runs([tmp_path], "main")
    assert table.rows[:2] == ["supervised (steps=20)", "supervised (steps=204800)"]
    assert len(rank_table(table).rows) == 20  # the supervised ones are not ranked
    error, _ = published_tables(table, "main")
    assert [row[1] for row in text(error)[2::3]][:2] == ["16.12 USB", "16.12 USB"]


def test_any_part_of_a_suite_makes_tables_and_says_what_is_missing(tmp_path):
    for name in SUITES:
        cells = suite_cells(name, [0])
        fabricated.run(tmp_path / name / cells[-1].folder, cells[-1].config)
        table = gather_runs([tmp_path / name], name)
        assert build_tables(table, suite=name, compare=True)
        missing = any(note.startswith("Not run yet") for note in table.notes)
        assert missing == (len(cells) > 1)


def test_where_a_run_was_made_does_not_decide_its_row(tmp_path):
    for seed, device in ((0, "cpu"), (1, "cuda")):
        fabricated.run(tmp_path / device, Config(seed=seed, device=device, workers=seed))
    assert len(gather_runs([tmp_path]).groups) == 1


def test_unfinished_repeated_and_strange_runs_are_said(make, tmp_path):
    folder = make()
    cell = suite_cells("digits", [0])[0]
    fabricated.run(folder / "stranger", cell.config)
    fabricated.run(folder / "twice", suite_cells("main", [0])[0].config)
    fabricated.run(folder / "again", suite_cells("main", [0])[0].config)
    (fabricated.run(folder / "half", Config()) / "result.json").unlink()
    notes = " ".join(gather_runs([folder], "main").notes)
    assert "Not of the suite main and left out: 1 runs" in notes
    assert "repeats" in notes
    assert "Not finished and left out: 1 of" in notes
    assert gather_runs([folder], "main").rows[0] == "supervised"


def test_runs_chosen_on_the_test_set_are_called_test_selected(tmp_path):
    fabricated.run(tmp_path / "a", Config(protocol="paper"))
    assert gather_runs([tmp_path]).rows == ["fixmatch (test-selected)"]


def test_both_protocols_stand_side_by_side(make):
    table = protocol_table(gather_runs([make()]))
    row = dict(zip(table.heads, text(table)[0], strict=True))
    assert row["error, held-out"] == "11.00 ± 1.00"
    assert row["error, test-selected"] == "8.00 ± 0.00"
    assert row["ECE, same step"] == "4.00 ± 0.00"
    assert row["flattered by"] == "3.00 ± 1.00"
    assert "TEST set" in table.notes[0]


def test_a_run_that_was_evaluated_once_has_no_test_selected_number(tmp_path):
    fabricated.run(tmp_path / "a", Config(), best={"evaluations": 1})
    assert protocol_table(gather_runs([tmp_path])) is None


def test_a_run_without_a_log_has_none_either(tmp_path):
    folders.made(tmp_path / "a", steps=0)  # as a frozen fit leaves it
    assert protocol_table(gather_runs([tmp_path])) is None


def test_real_results_hold_what_the_tables_need(tiny, tmp_path):
    from calmatch import train
    from calmatch.metrics import nll
    from calmatch.runs import probabilities

    run = train(tiny(steps=30, eval_every=5), tmp_path / "run", quiet=True)
    lines = run.lines("test")
    best = run.result.best_on_test
    assert best.error == min(line["error"] for line in lines)
    assert best.evaluations == len(lines) == 6
    chosen = next(line for line in lines if line["step"] == best.step)
    for name in ("ece", "classwise_ece", "adaptive_ece"):
        assert getattr(best, name) == chosen[name]
    scaled = run.result.temperature_scaled
    log_probs, labels = run.predictions()
    plain = float(nll(probabilities(log_probs), labels))
    assert scaled["oracle"].nll <= min(plain, scaled["crossfit"].nll)
    assert (
        seed_values(gather_runs([tmp_path]).groups[0], "nll_oracle")[0, 0] == scaled["oracle"].nll
    )
    assert selected_on_test(run) == best
    assert run.mean_logits().shape == (len(labels),)  # for figures of raw logits


def test_ranks_are_over_columns_and_leave_rows_with_gaps_out(make):
    rows = ("fixmatch", "fixmatch + margin", "mixmatch")
    folder = make(rows, ("eurosat_20", "eurosat_40"))
    shutil.rmtree(folder / "eurosat_20" / "mixmatch")
    table = rank_table(gather_runs([folder]))
    assert "2 columns" in table.title
    assert [row[:2] for row in text(table)] == [["fixmatch + margin", "1.00"], ["fixmatch", "2.00"]]
    assert any("left out: mixmatch" in note for note in table.notes)


def test_the_supervised_row_is_shown_and_not_ranked(make):
    rows = ("supervised", "fixmatch", "fixmatch + margin")
    table = gather_runs([make(rows, ("eurosat_20", "eurosat_40"))])
    assert table.rows[0] == "supervised"
    assert [row[0] for row in text(rank_table(table))] == ["fixmatch + margin", "fixmatch"]
    assert any("not ranked" in note for note in rank_table(table).notes)


def test_with_one_column_ranks_are_over_its_seeds(make):
    table = rank_table(gather_runs([make()]))
    assert "3 seeds" in table.title


def test_paired_differences_pair_by_seed(make):
    table = difference_table(gather_runs([make()]))
    row = dict(zip(table.heads, text(table)[0], strict=False))
    assert row["row"] == "fixmatch + margin"
    assert row["error change"] == "-2.00"
    assert text(table)[0][4] == "-2.00 to -2.00"


def test_without_a_plain_run_nothing_is_compared(make):
    assert difference_table(gather_runs([make(rows=["fixmatch + margin"])])) is None


def test_published_numbers_stand_beside_ours_with_their_doubts(make):
    folder = make(columns=("cifar100_400", "eurosat_40"))
    error, ece = published_tables(gather_runs([folder]), "")
    subset = published_tables(gather_runs([folder], "where"), "where")[0]
    assert any("19.73 ± 0.56" in entry for row in text(subset) for entry in row)
    ours, best, theirs = (dict(zip(error.heads, row, strict=True)) for row in text(error)[:3])
    assert ours["cifar100_400"] == "11.00 ± 1.00"
    assert best["cifar100_400"] == "8.00 ± 0.00"
    assert theirs["eurosat_40"] == "6.64 ± 5.03"
    assert theirs["cifar100_400"].startswith("19.42 ± 1.56 [")
    place = re.search(r"\[(\d+)\]", theirs["cifar100_400"])[0]
    assert any(note.startswith(place) and "19.73" in note for note in error.notes)
    assert ece.title.startswith("ECE")


def test_cells_that_nobody_published_are_said(tmp_path):
    fabricated.run(tmp_path / "a", Config())
    (table,) = published_tables(gather_runs([tmp_path]), "")
    assert not table.rows
    assert markdown([table])
    assert "None" in table.notes[0]


def nasty(tmp_path):
    name = "x(a='<b>&|_%$#{~^}')"
    fabricated.run(tmp_path / "a", Config(method=name))
    fabricated.run(tmp_path / "b", Config(method="fixmatch"))
    return build_tables(gather_runs([tmp_path]))


def test_markdown_is_aligned_and_escaped(tmp_path):
    page = markdown(nasty(tmp_path))
    blocks = re.findall(r"(?:^\|.*\n)+", page, re.M)
    assert len(blocks) >= 3
    for block in blocks:
        lines = block.splitlines()
        assert len({len(line) for line in lines}) == 1
        bars = [len(re.findall(r"(?<!\\)\|", line)) for line in lines]
        assert len(set(bars)) == 1
    assert "<b>" not in page


def test_latex_is_escaped_and_every_row_has_its_columns(tmp_path):
    page = latex(nasty(tmp_path))
    assert r"\textless{}b\textgreater{}\&|\_\%\$\#\{\textasciitilde{}\textasciicircum{}\}" in page
    body = re.sub(r"\\[&%$#_{}]", "", page)
    for table in re.findall(r"\\begin\{tabular\}\{([lr]+)\}(.*?)\\end\{tabular\}", body, re.S):
        lines = [line for line in table[1].splitlines() if line.endswith(r"\\")]
        assert {line.count("&") + 1 for line in lines} == {len(table[0])}
    assert body.count("{") == body.count("}")
    assert body.isascii()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("pdflatex"), reason="no LaTeX here")
def test_latex_compiles(tmp_path):
    head = r"\documentclass{article}\usepackage{booktabs,graphicx}\begin{document}"
    page = head + latex(nasty(tmp_path)) + r"\end{document}"
    (tmp_path / "t.tex").write_text(page)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    assert subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.slow
def test_a_thousand_runs_take_seconds(tmp_path):
    fine = suite_cells("paper")
    for number, cell in enumerate(fine):
        fabricated.run(tmp_path / cell.folder, cell.config, error=0.1 + 0.001 * (number % 7))
    for number in range(1000 - len(fine)):
        fabricated.run(tmp_path / "own" / str(number), Config(seed=number))
    start = time.process_time()  # others may use this machine too
    table = gather_runs([tmp_path])
    page = markdown(build_tables(table, compare=True))
    assert time.process_time() - start < 5
    assert sum(len(group.runs) for group in table.groups) == 1000
    assert "freematch + margin" in page


def test_the_command_prints_writes_and_refuses(make, typed, tmp_path, capsys):
    folder = make(columns=("eurosat_20", "eurosat_40"))
    ended = typed("table", folder, "--suite", "main", "--published")
    assert ended.returncode == 0, ended.stderr
    assert "**9.00 ± 1.00 ↓**" in ended.stdout
    assert "Seeds: 0, 1, 2; 3 runs a cell." in ended.stdout
    assert main(["table", str(folder), "-o", str(tmp_path / "new" / "table.csv")]) == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "new" / "table.csv").read_text())))
    mean = [r for r in rows if (r["kind"], r["metric"], r["row"]) == ("mean", "error", "fixmatch")]
    assert [float(row["value"]) for row in mean] == pytest.approx([11.0, 11.0])
    assert {row["kind"] for row in rows} >= {"run", "mean rank", "paired minus fixmatch"}
    for words, message in (
        ([folder, "-o", tmp_path / "table.doc"], "should end in"),
        ([tmp_path / "nowhere"], "There is no folder"),
        ([folder, "--suite", "mian"], "Did you mean 'main'"),
        ([tmp_path / "new"], "no finished run"),
        ([folder, "--suite", "longtail"], "no finished run of the suite longtail"),
    ):
        capsys.readouterr()
        assert main(["table", *map(str, words)]) == 2
        assert message in capsys.readouterr().err
