"""Prometheus text: what is a sample, what is refused and where; any labels survive being written and read."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench.prometheus import Sample, labels, parse, split, written
from tests.quiet import undisturbed

PAGE = """# HELP requests_total Requests.
# TYPE requests_total counter
requests_total{code="200",method="post"} 1027 1395066363000
requests_total{method="get", code="500",} 3
up 1
temperature  -2.5e-3
nothing NaN
most{le="+Inf"} +Inf
odd{path="C:\\\\DIR\\\\",say="a \\"b\\" {c}, d",two="x\\ny"} .5
exemplar_bucket{le="1.0"} 7 # {trace_id="abc"} 0.6 1520879607.789
# EOF
"""


def test_a_page_is_read_sample_by_sample() -> None:
    found = parse(PAGE)
    assert found[0] == Sample("requests_total", (("code", "200"), ("method", "post")), 1027.0)
    assert found[1].labels == (("code", "500"), ("method", "get"))
    assert found[2:4] == [Sample("up", (), 1.0), Sample("temperature", (), -0.0025)]
    assert found[4].value != found[4].value
    assert found[5].value == float("inf")
    assert dict(found[6].labels) == {"path": "C:\\DIR\\", "say": 'a "b" {c}, d', "two": "x\ny"}
    assert found[7] == Sample("exemplar_bucket", (("le", "1.0"),), 7.0)
    assert len(found) == 8


def test_only_what_is_wanted_is_read_and_other_lines_may_be_anything() -> None:
    assert parse('up 1\nother{broken="} x\nother{broken="} x\n', {"up"}) == [Sample("up", (), 1.0)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("up", "expected a number"),
        ("up one", "expected a number"),
        ("up 1_000", "expected a number"),
        ("up 1 later", "expected a time"),
        ("up 1 2 3", "expected nothing"),
        ("up{a=b} 1", "expected labels"),
        ('up{a="b} 1', "expected labels"),
        ('up{a="b" c="d"} 1', "expected labels"),
        ('up{a="b"', "expected labels"),
        ('up{a="b",a="c"} 1', "label a twice"),
        ("{} 1", "expected the name"),
        ("0up 1", "expected the name"),
        ("up=1", "expected a blank"),
        ("up 1\nup 2", "a second time"),
        ("<html>", "expected the name"),
        ("up " + "1" * 70_000, "expected at most"),
    ],
)
def test_what_is_no_sample_is_refused_with_its_line(line: str, said: str) -> None:
    last = 2 + line.count("\n")
    with pytest.raises(ValueError, match=rf"^line {last}: .*{said}"):
        parse("# fine\n" + line)


@given(st.dictionaries(st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]*", fullmatch=True), st.text(), max_size=4), st.floats())
def test_any_labels_survive(found: dict[str, str], value: float) -> None:
    key = written("x:y", tuple(sorted(found.items())))
    (sample,) = parse(f"{key} {value!r}" if value == value else f"{key} NaN")
    assert dict(sample.labels) == found
    assert split(key) == ("x:y", found)


def outcome(text: str) -> str:
    """`read`, or why not."""
    try:
        return "read" if all(isinstance(s.value, float) for s in parse(text)) else "no number"
    except ValueError as e:
        return str(e)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    assert outcome(text).startswith(("read", "line "))


@undisturbed
def test_hostile_labels_take_no_longer_than_their_length() -> None:
    begun_s = time.process_time()
    for text in ('a{b="' + "\\" * 60_001, 'a{b="' + '\\"' * 30_000, "a{" + 'b="",' * 10_000, "a{" + " " * 60_000):
        with pytest.raises(ValueError, match="line 1"):
            parse(text)
    assert time.process_time() - begun_s < 2  # quadratic time would be minutes


def test_labels_alone() -> None:
    assert labels('a="b",c="d"') == (("a", "b"), ("c", "d"))
    assert labels("") == ()
    with pytest.raises(ValueError, match="expected labels"):
        labels("a=b")
    with pytest.raises(ValueError, match="expected labels"):
        labels('a="b"} 1 {')
