"""The page of a diagnosis: what to do, and memory and time by rung."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from faststep._records import count, figure, size, span
from faststep.doctor._finding import Finding
from faststep.doctor._growth import LEAST_ACTIVE, growth
from faststep.doctor._user_code import users_stacks
from faststep.doctor._watch import Measured
from faststep.report import Html, cards, page, said, section, table

_WIDTH, _HEIGHT = 160, 32  # of a plot in a row, pixels
_CLASSES = {"failure": "error", "warning": "warning", "note": "soft"}
_STATUS = {"ok": "good", "skipped": "soft", "slow": "warning", "grows": "warning", "numbers": "warning"}


def page_of(
    verdict: Html,
    notes: Sequence[str],
    findings: Sequence[Finding],
    rungs: Sequence[Measured],
    gradients: Sequence[dict[str, Any]],
) -> str:
    """Return the page; see `Diagnosis.html`."""
    return page(
        "diagnosis of a training",
        f"<h1>Diagnosis</h1><p>{verdict}</p>",
        *(f'<p class="soft">{said(note)}</p>' for note in notes),
        cards(_numbers(findings, rungs)),
        section("What to do", "".join(map(_shown, findings))),
        section("Rungs", _rungs(rungs)),
        section("Gradients by module, at the last step in plain MLX", _gradients(gradients)),
        *(section(f"Stacks of '{each.title}'", _pre(users_stacks(each.stack))) for each in rungs if each.stack),
        *(
            section(f"Error of '{each.title}'", _pre(each.error["trace"]), folded=True)
            for each in rungs
            if each.error and each.error["trace"]
        ),
    )


def _numbers(findings: Sequence[Finding], rungs: Sequence[Measured]) -> list[tuple[str, str]]:
    known = {each.name: each for each in rungs}
    times = [
        (each.title, known[name].milliseconds) for name in ("data", "joint", "native") if (each := known.get(name))
    ]
    levels = [each.level for each in findings]
    found = [(f"{level}s", str(levels.count(level))) for level in ("failure", "warning", "note")]
    return [*found, *((title, span(each / 1e3)) for title, each in times if each is not None)]


def _shown(finding: Finding) -> str:
    head = f'<h3><span class="{_CLASSES[finding.level]}">{finding.level}</span> {said(finding.name)}</h3>'
    code = _pre(finding.code) if finding.code else ""
    return f"{head}<p>{said(finding.text)}</p><p>{said(finding.remedy)}</p>{code}"


def _pre(text: str) -> str:
    return f"<pre>{said(text)}</pre>"


def _rungs(rungs: Sequence[Measured]) -> str:
    rows = []
    for each in rungs:
        line, process = growth(each.column("active")), each.column("process")
        status = Html(f'<span class="{_STATUS.get(each.status, "error")}">{said(each.status)}</span>')
        rows.append(
            [
                each.title,
                status,
                span(each.milliseconds / 1e3) if each.milliseconds is not None else "-",
                _plot([1e3 * seconds for seconds in each.column("seconds")], "time"),
                size(max(each.column("active"))) if each.steps else "-",
                _plot(each.column("active"), "memory"),
                "-" if line is None else str(line) if line.is_real(LEAST_ACTIVE) else "none",
                size(max(process)) if process else "-",
                str(len(each.steps)) if each.seconds else "-",
                span(each.seconds) if each.seconds else "-",
            ]
        )
    header = ("rung", "", "time a step", "by step", "MLX memory", "by step", "growth", "process", "steps", "in all")
    return table(header, rows, numbers=(2, 4, 7, 8, 9))


def _gradients(modules: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            each["module"],
            str(each["output"] or "-"),
            count(each["parameters"]),
            *(figure(each[name]) for name in ("gradient", "weights", "update")),
        ]
        for each in modules
    ]
    header = ("module", "output", "parameters", "gradient", "weights", "update by weights")
    return table(header, rows, numbers=(2, 3, 4, 5))


def _plot(values: Sequence[float], name: str) -> Html:
    """Return values by step as a line from zero to the largest one."""
    if len(values) < 2:
        return Html("")
    most = max(values) or 1.0
    points = " ".join(
        f"{_WIDTH * place / (len(values) - 1):.1f},{_HEIGHT - 1 - (_HEIGHT - 2) * value / most:.1f}"
        for place, value in enumerate(values)
    )
    style = f"width:{_WIDTH}px;height:{_HEIGHT}px"
    line = f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.2"/>'
    return Html(
        f'<svg role="img" aria-label="{said(name)} by step" style="{style}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}">{line}</svg>'
    )
