"""Descriptions of the config: docs/config.md is what the package says, the JSON schema takes what the config takes."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml
from faststep.config import ConfigError, reference, validate
from support.commands import faststep
from support.configs import GOOD
from support.places import ROOT


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == reference(), "make docs"


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json.loads(faststep("schema").stdout)


def test_the_schema_takes_configs(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(GOOD.replace("1e-3", "0.001")), schema)
    for example in (ROOT / "examples").glob("*.yaml"):
        text = example.read_text(encoding="utf-8")
        jsonschema.validate(yaml.safe_load(text), schema)


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"stepz": 3}},
        {"train": {"steps": 0}},
        {"train": {"steps": 1, "validate_every": "1 epok"}},
        {"train": {"max_time": "1 week"}},
        {"model": {"use": "gtp", "layers": 1}},
        {"optimizer": [{"use": "AdamV"}]},
        {"loggers": [{"use": "nothing of mine"}]},
        {"data": {"train": {"use": "arrays"}, "batch_size": "4"}},
        {"lora": {"rank": -1}},
    ],
    ids=str,
)
def test_the_schema_refuses_what_the_config_refuses(schema: dict[str, Any], change: dict[str, Any]) -> None:
    values = yaml.safe_load(GOOD) | change
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, schema)
    with pytest.raises(ConfigError):
        validate(values)
