import itertools
import json

import numpy as np
import pytest

import fabricated
from calmatch.bench import figures
from calmatch.bench.paper import suite_cells
from calmatch.bench.tables import gather_runs
from calmatch.cli import main
from calmatch.report import charts

ROWS = ("supervised", "fixmatch", "fixmatch + margin", "freematch", "freematch + margin")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    for cell in suite_cells("digits", [0, 1]):
        if cell.row not in ROWS:
            continue
        penalised = "margin" in cell.row
        values = {"error": 0.1 - 0.01 * penalised + 0.01 * cell.seed, "ece": 0.05}
        fabricated.run(place / cell.folder, cell.config, **values)
        sharp = 1.5 if penalised else 3.0
        fabricated.history(place / cell.folder, seed=cell.seed, sharp=sharp)
        if cell.row == "supervised":
            path = place / cell.folder / "metrics.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            tested = [line for line in lines if line["kind"] == "test"]
            path.write_text("".join(json.dumps(line) + "\n" for line in tested))
    return place


@pytest.fixture(scope="module")
def table(folder):
    return gather_runs([folder])


@pytest.fixture(scope="module")
def prepared(table):
    contents = {name: drawing.prepare(table) for name, drawing in figures.FIGURES.items()}
    contents["logits_all"]["panels"] = contents["logits_all"]["panels"][:10]  # of fifty
    return contents


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_fits_a_page(prepared, name, tmp_path):
    figure = figures.draw_figure(name, prepared[name])
    assert 3.3 <= figure.get_size_inches()[0] <= 9
    assert charts.save_figure(figure, tmp_path / "a.svg").stat().st_size > 3000


@pytest.mark.parametrize("ending", [".svg", ".pdf", ".png"])
def test_a_figure_is_the_same_bytes_each_time(prepared, ending, tmp_path):
    paths = [tmp_path / f"{name}{ending}" for name in "ab"]
    for path in paths:
        charts.save_figure(figures.draw_figure("ranks", prepared["ranks"]), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize("name", figures.FIGURES)
def test_what_is_prepared_is_plain_numbers(prepared, name):
    assert json.loads(json.dumps(prepared[name])) == prepared[name]


def test_a_figure_says_what_it_is():
    for drawing in figures.FIGURES.values():
        line = drawing.prepare.__doc__.partition("\n")[0]
        assert len(line) > 20
        assert line.endswith(".")


@pytest.mark.parametrize("name", [n for n, item in figures.FIGURES.items() if item.published])
def test_published_numbers_can_be_drawn(name, tmp_path):
    figure = figures.draw_figure(name, figures.FIGURES[name].published())
    assert charts.save_figure(figure, tmp_path / "a.svg").stat().st_size > 3000


def test_reliability_puts_a_penalised_run_below_its_method(prepared):
    figure = figures.draw_figure("reliability", prepared["reliability"])
    figure.canvas.draw()
    places = {axes.get_title().partition("\nerror")[0]: axes.get_position() for axes in figure.axes}
    for method in ("fixmatch", "freematch"):
        above, under = places[method], places[f"{method}\n+ margin"]
        assert above.x0 == pytest.approx(under.x0)
        assert above.y0 > under.y0
    assert len({round(places[m].x0, 3) for m in ("supervised", "fixmatch", "freematch")}) == 3


def test_entropies_and_slopes_are_right():
    content = figures.prepare_entropy()
    p = np.array(content["p"])
    shannon, least = np.array(content["shannon"]), np.array(content["min"])
    assert (least <= shannon + 1e-12).all()
    inside = (np.abs(p - 0.5) > 0.01) & (p > 0.05) & (p < 0.95)
    for name, values in (("shannon_slope", shannon), ("min_slope", least)):
        slope = np.gradient(values, p)
        assert np.array(content[name])[inside] == pytest.approx(slope[inside], abs=0.01)


def test_agreement_leaves_out_runs_without_unlabelled_pictures_and_averages_seeds(prepared):
    lines = {curve["row"]: curve for curve in prepared["agreement"]["curves"]}
    assert "supervised" not in lines
    agree = lines["fixmatch"]["agree"]
    assert agree["mean"][-1] == pytest.approx(0.6 + 100 / 400 + 0.005)
    assert agree["low"][-1] < agree["mean"][-1] < agree["high"][-1]


def test_many_log_lines_become_few_points_weighted_by_what_was_accepted(folder, table):
    group = table.groups[1]
    run = next(iter(group.runs.values()))
    path = run.folder / "metrics.jsonl"
    before = path.read_text()
    shares = [(1.0, 0.0), (0.0, 3.0)] * 200  # only the first of each pair was accepted
    lines = [
        {"step": k, "kind": "train", "accepted": a, "agree": 0.75 if a else b}
        for k, (a, b) in enumerate(shares, 1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        curve = figures.series(group._replace(runs={(0, 0): run}), "train", ["agree"])
    finally:
        path.write_text(before)
    assert len(curve["step"]) == 100
    assert curve["agree"]["mean"] == pytest.approx([0.75] * 100)


def test_logits_are_raw_where_the_run_kept_their_mean_and_say_what_they_are(table, tmp_path):
    group = table.groups[0]
    logits, labels, names, kind = figures.logits_of(group)
    run = next(iter(group.runs.values()))
    log_probs = run.predictions()[0].double().numpy()
    assert kind == "logit"
    assert np.allclose(logits.mean(1), run.mean_logits())
    assert abs(logits.mean()) > 1
    assert np.allclose(logits - logits[:, :1], log_probs - log_probs[:, :1])
    assert logits.shape == (len(labels), len(names))
    place = fabricated.run(tmp_path / "run", group.config)
    fabricated.history(place, raw=False)
    logits, _, _, kind = figures.logits_of(gather_runs([place]).groups[0])
    assert "less the picture's mean" in kind
    with np.load(place / "predictions.npz") as arrays:
        np.savez(place / "predictions.npz", **arrays, mean_logit=np.full(3, np.nan))
    with pytest.raises(ValueError, match="that fit"):
        figures.logits_of(gather_runs([place]).groups[0])
    fabricated.history(place, raw=False)
    assert np.allclose(logits.mean(1), 0)


def test_every_panel_has_tick_labels_and_axis_titles(prepared):
    for name in ("reliability", "logits", "logits_all", "convergence", "entropy"):
        figure = figures.draw_figure(name, prepared[name])
        for axes in figure.axes:
            assert not axes.get_visible() or (axes.get_xlabel() and axes.get_ylabel())
            for axis in (axes.xaxis, axes.yaxis):
                assert (
                    not axes.get_visible()
                    or axis.get_tick_params()["labelleft" if axis is axes.yaxis else "labelbottom"]
                )


def test_dots_at_the_edge_are_whole_and_shading_is_explained(prepared):
    figure = figures.draw_figure("reliability", prepared["reliability"])
    for axes in figure.axes:
        (dots,) = [line for line in axes.lines if line.get_marker() == "o"]
        assert not dots.get_clip_on()
        assert not axes.texts  # numbers stand above the bars
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert any("darker" in word for word in words)
    for name in ("agreement", "convergence"):
        legend = figures.draw_figure(name, prepared[name]).legends[0]
        assert "range over seeds" in [text.get_text() for text in legend.get_texts()]


def test_doubted_numbers_are_marked_in_figures_of_the_published_ones():
    content = figures.published_radar()
    marked = {(p["column"], row) for p in content["plots"] for row in p["rows"] if "?" in row}
    assert ("stl10_40", "freematch + margin?") in marked
    assert ("cifar100_200", "freematch?") not in marked
    rims = {p["column"]: p["rim"] for p in content["plots"]}
    assert rims["eurosat_20"] == rims["eurosat_40"]
    assert rims["cifar100_200"] == rims["cifar100_400"]
    assert "freematch + margin" in figures.published_ranks()["doubted"]
    assert "dash" not in figures.published_ranks()["doubted"]


def test_densities_integrate_to_one_and_the_penalty_narrows_the_range(prepared):
    panels = {panel["title"]: panel for panel in prepared["logits"]["panels"]}
    for panel in panels.values():
        for heights in panel["density"].values():
            assert np.trapezoid(heights, panel["x"]) == pytest.approx(1, abs=0.05)
    wide, narrow = (np.ptp(panels[row]["range"]) for row in ("fixmatch", "fixmatch + margin"))
    assert narrow < wide


def test_a_class_that_is_not_there_is_a_sentence(table):
    with pytest.raises(ValueError, match="There is no class 10"):
        figures.prepare_logits(table, target=10)


def test_many_classes_show_the_target_and_its_rivals(table, tmp_path):
    cell = suite_cells("digits", [0])[0]
    place = fabricated.run(tmp_path / "run", cell.config)
    result = json.loads((place / "result.json").read_text())
    (place / "result.json").write_text(
        json.dumps({**result, "classes": [str(k) for k in range(30)]})
    )
    fabricated.history(place, classes=30)
    panel = figures.prepare_logits(gather_runs([place]), target=25)["panels"][0]
    assert len(panel["density"]) == 10
    assert "25" in panel["density"]


def test_ranks_of_the_published_numbers_reach_the_figure():
    tests = figures.published_ranks()["tests"]
    assert tests["all"]["rank"]["freematch + margin"] == pytest.approx(2.0833, abs=1e-3)
    assert len(figures.published_radar()["plots"]) == 6
    assert all(plot["rim"] > max(plot["ece"]) for plot in figures.published_radar()["plots"])


def test_more_rows_than_a_reader_can_tell_apart_are_refused(table):
    groups = [group._replace(row=f"{group.row} {k}") for k in range(5) for group in table.groups]
    many = table._replace(groups=groups)
    for name, said in (("convergence", "25 curves"), ("radar", "3 to 8")):
        with pytest.raises(ValueError, match=said):
            figures.FIGURES[name].prepare(many)


def test_what_stands_over_a_logit_panel_is_not_cut(tmp_path):
    for cell in suite_cells("losses", [0]):
        if cell.column == "stl10_40":  # logits as large as the paper's
            place = fabricated.run(tmp_path / cell.folder, cell.config)
            fabricated.history(place, sharp=5.4)
    image = figures.draw_figure("logits", figures.prepare_logits(gather_runs([tmp_path])))
    image.canvas.draw()
    boxes = [axes.title.get_window_extent() for axes in image.axes]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert boxes[-1].x1 < image.bbox.x1


def test_with_several_columns_most_figures_are_one_for_each(table):
    other = [group._replace(column="other") for group in table.groups]
    both = table._replace(groups=[*table.groups, *other])
    parts = {stem: part for _, stem, part in figures.figures_of(both)}
    assert parts["logits_other"].columns == ["other"]
    assert parts["ranks"].columns == ["digits_40", "other"]
    assert [stem for _, stem, _ in figures.figures_of(table)] == list(figures.FIGURES)
    with pytest.raises(ValueError, match="Did you mean 'other'"):
        both.only("othr")
    with pytest.raises(ValueError, match="choose runs with --column"):
        figures.prepare_logits_all(both._replace(groups=both.groups * 5))


def test_the_command_draws_lists_and_refuses(folder, tmp_path, capsys):
    out = tmp_path / "new" / "figure.pdf"
    assert main(["figure", "reliability", str(folder), "-o", str(out)]) == 0
    assert out.read_bytes().startswith(b"%PDF")
    assert main(["figure", "--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in figures.FIGURES)
    assert main(["figure", "rank", str(folder)]) == 2
    assert "Did you mean 'ranks'" in capsys.readouterr().err


def test_mistakes_are_sentences(folder, tmp_path, monkeypatch):
    from calmatch.bench import FigureOptions, figure_command

    monkeypatch.chdir(tmp_path)
    figure_command("entropy", FigureOptions())
    assert (tmp_path / "entropy.svg").read_text().lstrip().startswith("<?xml")
    figure_command("logits", FigureOptions((folder,), target=3))
    assert (tmp_path / "logits.svg").exists()
    figure_command("ranks", FigureOptions(published=True, out=tmp_path / "c.png"))
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    for name, options, message in (
        ("ranks", FigureOptions(), "needs run folders"),
        ("agreement", FigureOptions(published=True), "prints no numbers"),
        ("entropy", FigureOptions(out=tmp_path / "x.gif"), "should end in"),
    ):
        with pytest.raises(ValueError, match=message):
            figure_command(name, options)
