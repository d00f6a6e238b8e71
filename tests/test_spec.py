import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calmatch import augment, losses, methods, metrics, spec
from calmatch.core import Task
from calmatch.training.config import Config

TASK = Task(10, 40, 100, 8, 100, (4,) * 10)


def test_a_spec_is_a_name_with_literal_arguments():
    assert spec.parse("a.b(1, 'x', k=[1.5, None])") == spec.Spec(
        "a.b", (1, "x"), {"k": [1.5, None]}
    )


@pytest.mark.parametrize(
    "text", ["a", "a.b(1, 'x', k=[1.5, None])", "margin(m='labels')", "f(-2, hard=False)"]
)
def test_a_written_spec_is_parsed_to_itself(text):
    assert spec.write(spec.parse(text)) == text


def test_specs_chain_with_bars_and_add_with_plus():
    assert [s.name for s in spec.chain("flip|crop(4)|cutout(0.5)")] == ["flip", "crop", "cutout"]
    assert [s.name for s in spec.added("cross_entropy + margin(m=-8)")] == [
        "cross_entropy",
        "margin",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "margin(m=__import__('os'))",
        "margin(m=1+1)",
        "margin(m=x)",
        "margin(**{})",
        "margin(*[1])",
        "(lambda: 1)()",
        "margin()()",
        "a if b else c",
        "[1]",
        "",
        "margin(",
        "a\x00b",
        "a" * 5000,
        "(" * 900,
    ],
)
def test_anything_but_literals_is_an_error_and_not_a_call(text):
    with pytest.raises(spec.SpecError):
        spec.parse(text)
    with pytest.raises(spec.SpecError):
        losses.build(text)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
def test_no_text_makes_the_parser_fail_otherwise(text):
    for read in (spec.parse, spec.chain, spec.added, spec.components):
        with contextlib.suppress(spec.SpecError):
            assert read(text) is not None


@pytest.mark.parametrize(
    ("build", "text", "hint"),
    [
        (losses.build, "margn(m=1)", "Did you mean 'margin'"),
        (losses.build, "margin(weigth=1)", "Did you mean 'weight'"),
        (losses.build, "margin(m='a')", "it takes a number"),
        (losses.build, "margin(where='agre')", "'agree' or 'disagree' or 'all'"),
        (losses.build, "margin(m=-1)", "must lie between"),
        (metrics.build, "ecee", "Did you mean 'ece'"),
        (augment.pipeline, "flip|corp(4)", "Did you mean 'crop'"),
        (lambda text: methods.build(text, TASK), "fixmach", "Did you mean 'fixmatch'"),
        (
            lambda text: methods.build(text, TASK),
            "fixmatch(thresold=1)",
            "Did you mean 'threshold'",
        ),
        (lambda text: methods.build(text, TASK), "fixmatch(threshold=2)", "must lie between"),
        (lambda text: methods.build(text, TASK), "no.such.Method", "Cannot import"),
        (lambda text: methods.build(text, TASK), "os.path.join", "not a Method"),
        (lambda text: Config().replace(**{text: 1}), "penaly", "Did you mean 'penalty'"),
    ],
)
def test_a_mistake_gets_a_sentence_with_the_nearest_name(build, text, hint):
    with pytest.raises(ValueError, match=r".") as error:
        build(text)
    assert hint in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        *("b.c", "a|b.c(1)|d", "x.y + z", "embedded(on='os.system')", "timm(name='hf-hub:a/b')"),
        *("embedded(on='embedded(on=\\'a.b\\')')", "timm.x(checkpoint_path='/etc/passwd')"),
        "embedded(on='timm.x(cache_dir=1)')",
    ],
)
def test_code_in_a_spec_from_a_file_is_found_wherever_it_hides(text):
    with pytest.raises(ValueError, match="--trust"):
        spec.from_file(text, "model.json", False, "timm")
    assert spec.from_file(text, "model.json", True, "timm") == text


@pytest.mark.parametrize("text", ["flip|crop(4)", "timm.resnet18(pretrained=True)", "a(b='c.d')"])
def test_data_in_a_spec_from_a_file_passes(text):
    assert spec.from_file(text, "config.json", False, "timm") == text
