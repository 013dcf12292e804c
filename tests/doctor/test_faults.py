"""Planted faults: each is a program of its own, and is named with its remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.faults import FAULTS, diagnosed


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_remedy(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    found = diagnosed(tmp_path, fault.code, fault.rungs)
    named = [each for each in found["findings"] if each["name"] == fault.finding]
    assert named, found["findings"]
    finding = named[0]
    for words in fault.says:
        assert words in finding["text"]
    assert fault.remedy in finding["remedy"] + finding["code"]
    rungs = {each["name"]: each["status"] for each in found["rungs"]}
    if fault.status is not None:
        assert rungs[fault.status[0]] == fault.status[1]
    others = [each["name"] for each in found["findings"] if each["name"] != fault.finding and each["level"] != "note"]
    assert not others, found["findings"]
