"""PATH[:SHARE][:priority=N][:name=CLASS], whoever reads it."""

import pytest

from llm_bench.errors import BenchError
from llm_bench.parts import Part, class_of, parse

RIGHT = "expected such as a.jsonl:1"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("a.jsonl", Part("a.jsonl", None, "a", None)),
        ("a.jsonl:3", Part("a.jsonl", 3.0, "a", None)),
        ("x:y/a.jsonl.gz:0.5:name=b:priority=-2", Part("x:y/a.jsonl.gz", 0.5, "b", -2)),
        ("a:7", Part("a", 7.0, "a", None)),
        ("a.jsonl:inf", Part("a.jsonl", float("inf"), "a", None)),  # which shares there are is who asks' to say
    ],
)
def test_a_part_is_read_as_typed(text: str, right: Part) -> None:
    assert parse(text, "part", RIGHT) == right


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "no path"),
        (":3", "no path"),
        (":", "no path"),
        ("a:1:size=3", "no option 'size'"),
        ("a:1:name=", "name without a value"),
        ("a:1:name=b:name=c", "name twice"),
        ("a:1:priority=x", "priority 'x', expected a whole number of 32 bits"),
        ("a:1:priority=2147483648", "priority '2147483648'"),
        ("a:1:priority=1.5", "priority '1.5'"),
    ],
)
def test_what_is_wrong_says_where_and_what_is_right(text: str, wrong: str) -> None:
    with pytest.raises(BenchError) as e:
        parse(text, "--beside", RIGHT)
    assert str(e.value).startswith(f"--beside {text!r}: {wrong}")
    assert "expected" in str(e.value)


@pytest.mark.parametrize(("path", "name"), [("x/chat.jsonl.zst", "chat"), ("chat.v2.csv", "chat.v2"), ("chat", "chat")])
def test_a_class_is_named_after_its_file(path: str, name: str) -> None:
    assert class_of(path) == name
