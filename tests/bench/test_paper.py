"""Every cell of every suite: its real configuration is built, and it trains on stand-in data."""

import functools
import re
from pathlib import Path

import pytest
import torch

from calmatch import augment, losses, methods, nets
from calmatch.bench import paper
from calmatch.bench.paper import (
    PUBLISHED_TABLES,
    SUITE_LINES,
    SUITES,
    find_published,
    suite_cells,
)
from calmatch.core import Task
from calmatch.data.batches import long_tail
from calmatch.data.dataset import DATASETS, Dataset
from calmatch.training import recipes
from calmatch.training.config import check_config
from calmatch.training.setup import build_losses, build_parts, margin_warnings
from calmatch.training.step import make_training

ALL = [cell for suite in SUITES for cell in suite_cells(suite)]
SIZES = {"eurosat": [3000] * 4 + [2500, 2500, 2000, 2500, 3000, 2500]}  # its classes are uneven
NETS = {
    "vit": "calmatch.nets.timm.ViT(size={size}, patch=4, width=12, heads=2, depth=2)",
    "wrn": "calmatch.nets.classic.WideResNet(depth=10, widen=1)",
    "efficientnet": "efficientnet_lite0(pretrained=False)",
    "small": "small(width=4)",
}
NETS["timm.vit"] = NETS["vit"]


def family(net):
    return re.split(r"[_(]", net)[0]


def combination(cell):
    """What decides the code that a cell runs."""
    config = cell.config
    return config.method, config.unlabelled_loss, config.penalty, family(config.net), config.dataset


def standin(name, size=8, **settings):
    """Noise with the class counts of the real dataset and few pixels."""
    counts = SIZES.get(name, [500] * (100 if name.startswith("cifar100") else 10))
    if name == "cifar10":
        counts = [5000] * 10
    if name == "eurosat":
        counts = [number * 4 // 5 for number in counts]
    labels = torch.cat([torch.full((n,), k) for k, n in enumerate(counts)])
    if name == "stl10":
        labels = torch.cat([labels, torch.full((1000,), -1)])
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (len(labels), 3, size, size), generator=generator)
    few = torch.arange(len(counts))
    extra = {"whole_pool": name == "stl10", "shuffle_first": name == "eurosat"}
    if name == "cifar100_lt":
        tails = [(150, settings["gamma_l"]), (300, settings["gamma_u"])]
        kinds = ("labelled_counts", "unlabelled_counts")
        for kind, (head, gamma) in zip(kinds, tails, strict=True):
            extra[kind] = tuple(long_tail(head, gamma, 100))
    pictures = images.to(torch.uint8)
    names = tuple(map(str, range(len(counts))))
    return Dataset(pictures, labels, pictures[: len(few)], few, names, **extra)


@pytest.fixture
def standins(monkeypatch):
    def make(name):
        pixels = 16 if name == "stl10" else 8

        @functools.cache
        def build(*, size: int = 32, gamma_l: float = 10.0, gamma_u: float = 10.0):
            return standin(name, 16 if size > 32 else pixels, gamma_l=gamma_l, gamma_u=gamma_u)

        return build

    for name in ("cifar10", "cifar100", "cifar100_lt", "stl10", "eurosat"):
        monkeypatch.setitem(DATASETS, name, STANDINS.setdefault(name, make(name)))


STANDINS = {}


def small(cell):
    """The cell with a tiny network of the same family and small batches, else as it is."""
    config = cell.config
    size = 16 if "stl10" in config.dataset or "size=64" in config.dataset else 8
    net = NETS[family(config.net)].format(size=size)
    few = {"batch": min(8, config.batch), "ratio": min(2, config.ratio), "chunk": 3}
    return config.replace(net=net, device="cpu", precision="fp32", **few)


def three_steps(cell):
    run = make_training(small(cell), build_parts(small(cell)))
    before = [p.detach().clone() for p in run.parts.net.parameters()]
    for _ in range(3):
        run.advance()
    read = run.sums.read()
    assert torch.isfinite(torch.tensor(read["loss"]))
    moved = zip(before, run.parts.net.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in moved)
    return run


COMBINATIONS = {combination(cell): cell for cell in ALL}
KINDS = {  # a cell of every method, of every loss and penalty, and of every network
    **{("method", cell.config.method.split("(")[0]): cell for cell in ALL[::-1]},
    **{
        ("loss", re.sub(r"[\d.]+", "", c.config.unlabelled_loss + c.config.penalty)): c
        for c in ALL[::-1]
    },
    **{("net", family(cell.config.net), cell.config.dataset): cell for cell in ALL[::-1]},
}
FAST = list({combination(cell): cell for cell in KINDS.values()}.values())


@pytest.mark.parametrize("cell", FAST, ids=lambda cell: str(cell.folder))
def test_a_cell_of_every_kind_trains_on_stand_in_data(cell, standins):
    three_steps(cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", COMBINATIONS.values(), ids=lambda cell: str(cell.folder))
def test_every_cell_trains_on_stand_in_data(cell, standins):
    three_steps(cell)


STARVED = [("margin", method, "margin(m=4)") for method in ("fixmatch", "flexmatch")]


def test_every_cell_builds_its_real_configuration():
    task = Task(10, 40, 100, 16, 204_800, (4,) * 10)
    seen = set()
    for cell in ALL:
        config = cell.config
        check_config(config)
        parts = (config.weak, config.strong, config.method, config.unlabelled_loss, config.penalty)
        if (*parts, config.net) in seen:
            continue
        seen.add((*parts, config.net))
        augment.pipeline(config.weak), augment.pipeline(config.strong)
        classes = 100 if "cifar100" in config.dataset else 10
        method = methods.build(config.method, task._replace(classes=classes))
        _, loss = build_losses(config, method)
        warned = margin_warnings(config, method, loss)
        starving = (cell.suite, config.method.split("(")[0], config.penalty)
        assert bool(warned) == (starving in STARVED)


@pytest.mark.parametrize("net", sorted({cell.config.net for cell in ALL}))
def test_every_network_exists_in_its_real_size(net):
    plain = re.sub(r"pretrained='usb'", "", net).replace("()", "")
    plain = plain.replace("pretrained=True", "pretrained=False")
    plain = f"{net}(pretrained=False)" if net in nets.LITE else plain
    with torch.device("meta"):
        assert sum(p.numel() for p in nets.build(plain, 10, 96 if "96" in net else 32).parameters())


def test_splits_have_the_published_sizes(standins):
    sizes = {"cifar100_200": 50_000, "eurosat_20": 21_600, "stl10_40": 6_040, "cifar10_40": 50_000}
    sizes |= {"cifar100_lt_10_10": 11_720, "cifar100_lt_15_15": 10_352}
    labelled = {"cifar100_lt_10_10": 5_835, "cifar100_lt_15_15": 5_153}
    for column, unlabelled in sizes.items():
        cell = next(cell for cell in ALL if cell.column == column)
        chosen = build_parts(small(cell)).split
        assert len(chosen.unlabelled) == unlabelled
        assert len(chosen.labelled) == labelled.get(column, cell.config.labels)


def test_a_folder_is_one_run_and_suites_that_share_a_run_share_its_folder():
    by_folder, by_config = {}, {}
    for cell in ALL:
        assert by_folder.setdefault(cell.folder, cell.config) == cell.config
        assert by_config.setdefault(cell.config, cell.folder) == cell.folder
        assert re.fullmatch(r"[\w.+=/-]+", str(cell.folder))


def test_the_seed_also_draws_the_labelled_pictures_anew():
    for cell in ALL:
        assert cell.config.split_seed == cell.seed
        assert cell.config.seed == cell.seed
        assert cell.source
        assert cell.config.protocol == "held-out"


def test_margins_and_weights_are_the_published_ones():
    penalties = {(c.row, c.column): c.config.penalty for c in suite_cells("main")}
    for method in ("fixmatch", "flexmatch", "freematch"):
        assert penalties[f"{method} + margin", "cifar100_400"] == "margin(m=10)"
        assert penalties[f"{method} + margin", "eurosat_20"] == "margin(m=8)"
    assert penalties["freematch + margin", "stl10_40"] == "margin(m=4)"
    assert penalties["freematch + margin", "stl10_100"] == "margin(m=6)"
    assert penalties["flexmatch + margin", "stl10_40"] == "margin(m=10)"
    assert losses.build("margin").keywords == {}  # the loss's own default is the published 0.1
    assert losses.margin.__kwdefaults__["weight"] == 0.1


def test_every_source_stands_on_the_page_about_the_paper():
    page = (Path(__file__).parents[2] / "docs" / "paper.md").read_text()
    heads = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9]+", "-", head.lower()).strip("-") for head in heads}
    for cell in ALL:
        for anchor in re.findall(r"docs/paper\.md#([\w-]+)", cell.source):
            assert anchor in anchors
        assert "FACTS" not in cell.source
        assert "docs/" in cell.source


def test_refixmatch_has_usbs_rate_on_every_dataset():
    for name in ("cifar100_200", "eurosat_40", "stl10_40"):
        config = recipes.RECIPES[name]("refixmatch(temperature=1.0)")
        assert (config.lr, config.layer_decay) == (5e-5, 1.0)


def test_the_texts_network_starts_pretrained_and_is_in_a_suite():
    nets_of = {cell.config.net for cell in suite_cells("text")}
    assert nets_of == {recipes.stl10_text().net}
    assert all("pretrained=True" in net and "vit_small_patch16" in net for net in nets_of)


def test_flexmatch_has_no_warmup_where_usb_has_none():
    warmups = {(c.row, c.column): c.config.warmup for c in suite_cells("main")}
    assert warmups["flexmatch", "cifar100_200"] == warmups["flexmatch + margin", "eurosat_40"] == 0
    assert warmups["flexmatch", "stl10_40"] == warmups["fixmatch", "cifar100_200"] == 5_120


@pytest.mark.parametrize(
    ("suite", "rows", "columns"),
    [
        ("main", 11, 6),
        ("supplement", 20, 6),
        ("simmatch", 2, 3),
        ("bam", 3, 2),
        ("where", 12, 2),
        ("losses", 4, 6),
        ("longtail", 6, 6),
        ("text", 6, 2),
        ("digits", 7, 1),
    ],
)
def test_a_suite_is_a_full_table_of_three_seeds(suite, rows, columns):
    cells = suite_cells(suite)
    assert len({cell.row for cell in cells}) == rows
    assert len({cell.column for cell in cells}) == columns
    assert len(cells) == len({cell[1:4] for cell in cells}) == 3 * rows * columns


def test_paper_holds_every_run_of_its_suites_once():
    parts = ("main", "supplement", "simmatch", "bam", "where", "losses", "longtail")
    wanted = {cell.folder for part in parts for cell in suite_cells(part)}
    folders = [cell.folder for cell in suite_cells("paper")]
    assert len(folders) == len(wanted)
    assert set(folders) == wanted


def test_rows_stand_as_the_paper_has_them():
    first = "pimodel meanteacher vat mixmatch remixmatch uda crmatch comatch dash adamatch simmatch"
    rows = SUITES["supplement"]["rows"][1:]  # after the supervised one, which is ours
    assert rows[:14] == [*first.split(), "softmatch", "defixmatch", "fixmatch"]
    ends = [row.rpartition(" ")[2] for row in SUITES["losses"]["rows"]]
    assert ends == ["freematch", "focal", "smoothing", "margin"]


def test_other_seeds_can_be_asked_for():
    cells = suite_cells("digits", [7, 3])
    assert [cell.seed for cell in cells[:2]] == [7, 3]
    assert cells[0].config == recipes.digits_40("supervised", seed=7, split_seed=7)
    for wrong in ([], [1, 1], [-1]):
        with pytest.raises(ValueError, match="Seeds are different"):
            suite_cells("digits", wrong)


def test_an_unknown_suite_gets_the_nearest_name():
    with pytest.raises(ValueError, match="Did you mean 'digits'"):
        suite_cells("digit")


def test_the_docs_list_every_suite():
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
    for name, said in SUITE_LINES.items():
        assert f"| `{name}` | {said} | {len(suite_cells(name)):,} |" in page


def test_every_suite_says_what_it_is_in_a_line():
    assert all(20 < len(line) < 100 for line in SUITE_LINES.values())


def test_every_published_cell_is_a_cell_of_its_suite_and_every_doubt_has_its_number():
    for table, numbers in PUBLISHED_TABLES.items():
        if table == "usb":
            continue
        cells = {(cell.row, cell.column) for cell in suite_cells(table)}
        assert {(row, column) for row, column, _ in numbers} <= cells
    lines = (Path(paper.__file__).with_name("published.txt").read_text("utf-8")).splitlines()
    reasons = [line.rpartition(" | ")[2] for line in lines if line.startswith("?")]
    doubts = [number.doubt for numbers in PUBLISHED_TABLES.values() for number in numbers.values()]
    assert len(doubts) == 448
    assert all(any(reason in doubt for doubt in doubts) for reason in reasons)
    assert PUBLISHED_TABLES["main"]["dash", "stl10_40", "ece"] == (11.23, 2.33, "")


def test_contradictory_numbers_are_found_under_their_own_table():
    cell = ("fixmatch", "cifar100_400", "error")
    assert find_published(*cell)[1].value == 19.42
    assert find_published(*cell, "where")[1].value == 19.73
    assert "19.73" in find_published(*cell)[1].doubt
    assert find_published("supervised", "stl10_40", "error")[0] == "usb"
    assert find_published("supervised", "stl10_40", "ece") is None
