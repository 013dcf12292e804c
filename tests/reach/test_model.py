from __future__ import annotations

import pytest
from support.beside import Variant, beside, cases
from support.programs.reach import Program


@pytest.mark.parametrize(("program", "variant"), cases("model"))
def test_a_program_is_its_plain_loop(program: Program, variant: Variant) -> None:
    beside(program, variant)
