"""The YAML of a config: what its values mean, and that what is written reads as what it was."""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path
from typing import Any

import pytest
from faststep.config import ConfigError, load
from faststep.config._yaml import read, write
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.configs import GOOD

INPUTS = int(os.environ.get("FASTSTEP_FUZZ", "2000"))  # of the three fuzz tests together


def fuzz(share: float) -> settings:
    """Return the settings of a test that takes this share of all inputs; the usual ones are the same each time."""
    usual = INPUTS == 2000
    checks = list(HealthCheck)
    return settings(
        max_examples=int(share * INPUTS), deadline=None, derandomize=usual, suppress_health_check=checks, database=None
    )


texts = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
trees = st.recursive(
    scalars, lambda inside: st.lists(inside, max_size=4) | st.dictionaries(texts, inside, max_size=4), max_leaves=12
)
NAMES = """
    model loss data train validation use optimizer learning_rate step lora rank quantize frozen weights seed
    run folder cosine_decay warmup decay_steps join_schedules schedules boundaries parameters AdamW Muon gpt
    mlp bytes arrays file layers width sizes * & ! | > - ? : , [ ] { } # % @ ` ' " \\ << ~ .inf 1e-3 0x1F
    1e999 -1 0 4 true null
"""
SIGNS = [
    "\n",
    "\n  ",
    "\n    ",
    " ",
    ": ",
    "- ",
    "\t",
    "&a ",
    "*a ",
    "!!str ",
    "!!int ",
    "--- ",
    "...\n",
    "\u2028",
    "\x00",
]
words = st.sampled_from(NAMES.split() + SIGNS)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-2E5", -2e5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("12", 12),
        ("-0", 0),
        ("0x1F", 31),
        ("0o17", 15),
        ("017", 17),
        ("no", "no"),
        ("On", "On"),
        ("true", True),
        ("~", None),
        ("", None),
        ("1:30", "1:30"),
        ("2001-01-01", "2001-01-01"),
        ("1_000", "1_000"),
        ("1e", "1e"),
        ("'1e-3'", "1e-3"),
        ("!!str 1", "1"),
        ("!!float 1", 1.0),
        ("{a: &x {b: 1, c: 2}, d: {<<: *x, c: 3}}", {"a": {"b": 1, "c": 2}, "d": {"c": 3, "b": 1}}),
        (
            "{a: [&x {b: 1}, &y {b: 2, c: 3}], d: {<<: [*x, *y]}}",
            {"a": [{"b": 1}, {"b": 2, "c": 3}], "d": {"b": 1, "c": 3}},
        ),
    ],
)
def test_what_values_mean(text: str, value: Any) -> None:
    found = read(text, "x")[0]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\n\nb: [1,\n 2]\na: 2", "x:5: a: set twice, the first time in line 1"),
        ("a: &a [*a]", "an alias that holds itself"),
        ("a: 1\n--- \nb: 1", "x:2: expected YAML"),
        ("[" * 5000, "expected fewer levels of nesting"),
        ("&a [1,1,1,1,1,1,1,1,1,1]", None),
        ("a: !!int yes", "x:1: a: expected int, as its tag says, got 'yes'"),
        ("9" * 5000, "got 5000 of them"),
        ('a: "\\ud800"', "which no file can hold"),
        ('a: "\\Uffffffff"', "expected YAML"),
        ("a: {<<: 3}", "expected a mapping after <<"),
        ("? [1]\n: 2", "x:1: expected text for a key, got a list or a mapping"),
        ("a: \x01", "expected YAML"),
    ],
)
def test_what_is_no_config(text: str, expected: str | None) -> None:
    if expected is None:
        read(text, "x")
        return
    with pytest.raises(ConfigError) as caught:
        read(text, "x")
    assert expected in str(caught.value)


def test_aliases_do_not_explode() -> None:
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10) if i else 1}]" for i in range(12)]
    with pytest.raises(ConfigError, match="more than 100000 values"):
        read("\n".join(levels), "x")


def test_places_are_those_of_keys() -> None:
    _, places = read("a:\n  b:\n    - 1\n    - {c: 2}\n", "x")
    expected = {(): "x:1", ("a",): "x:1", ("a", "b"): "x:2", ("a", "b", 0): "x:3", ("a", "b", 1): "x:4"}
    assert places == expected | {("a", "b", 1, "c"): "x:4"}


@settings(max_examples=300, deadline=None)
@given(trees)
@example({"": [{}], "1e5": "1e5", "<<": "<<", "~": "null", "a": "0x10"})
def test_what_is_written_reads_as_it_was(tree: Any) -> None:
    assert read(write(tree), "x")[0] == tree


def attempt(folder: Path, text: str | bytes, overrides: list[str]) -> None:
    """Load what may be anything: it is a config, which is written and read again the same, or a ConfigError."""
    file = folder / "fuzz.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    try:
        config = load(file, overrides)
    except ConfigError:
        return
    (folder / "again.yaml").write_text(config.text(), encoding="utf-8")
    assert load(folder / "again.yaml") == config


@fuzz(0.5)
@given(
    st.binary() | st.text() | st.lists(words).map("".join),
    st.lists(st.text() | st.lists(words).map("".join), max_size=2),
)
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, text: str | bytes, overrides: list[str]) -> None:
    attempt(tmp_path_factory.getbasetemp(), text, overrides)


@fuzz(0.3)
@given(st.data())
def test_any_change_of_a_config(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    text = GOOD
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        length = data.draw(st.sampled_from([0, 0, 1, 3, 10]))
        text = text[:start] + data.draw(words | st.text(max_size=3)) + text[start + length :]
    attempt(tmp_path_factory.getbasetemp(), text, [])


@pytest.mark.slow
@fuzz(0.2)
@given(
    st.lists(
        st.tuples(st.sampled_from(range(40)), trees | st.sampled_from([[], {}, {"use": "mlp"}, "a.py:b"])), max_size=3
    )
)
def test_any_value_of_any_key(tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, Any]]) -> None:
    values, _ = read(GOOD, "x")
    values |= {
        "lora": {"rank": 1},
        "quantize": {"bits": 4},
        "callbacks": [{"use": "a.py:b"}],
        "step": {"accumulate": 1},
    }
    values["optimizer"]["learning_rate"] = {
        "use": "join_schedules",
        "schedules": [{"use": "cosine_decay"}] * 2,
        "boundaries": [3],
    }
    for which, value in changes:
        holders = list(_holders(values))
        holder = holders[which % len(holders)]
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        if keys:
            holder[keys[which % len(keys)]] = copy.deepcopy(value)
    attempt(tmp_path_factory.getbasetemp(), write(values), [])


def _holders(values: Any) -> Any:
    if isinstance(values, dict | list):
        yield values
        for each in values.values() if isinstance(values, dict) else values:
            yield from _holders(each)
