"""Pages of HTML that need nothing from elsewhere."""

from __future__ import annotations

import errno
import html
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from faststep._files import write_text

STYLE = """
:root { color-scheme: light dark; --ink: #24292f; --soft: #656d76; --grid: #d8dee4; --paper: #ffffff;
  --card: #f6f8fa; --good: #1a7f37; --warning: #9a6700; --error: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --ink: #d7dde3; --soft: #8b949e; --grid: #30363d; --paper: #0d1117;
  --card: #161b22; --good: #3fb950; --warning: #d29922; --error: #f85149; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 1400px; color: var(--ink); background: var(--paper);
  font: 14px/1.45 system-ui, "Segoe UI", "Liberation Sans", Arial, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2rem 0 0.6rem; }
h3 { font-size: 0.95rem; margin: 0; } p { margin: 0.3rem 0; } .soft { color: var(--soft); }
.good { color: var(--good); } .warning { color: var(--warning); } .error { color: var(--error); }
.cards { display: flex; flex-wrap: wrap; gap: 0.6rem; margin: 1rem 0; }
.card, figure { background: var(--card); border: 1px solid var(--grid); border-radius: 6px; }
.card { padding: 0.5rem 0.8rem; white-space: nowrap; }
.card b { display: block; font-size: 1.15rem; font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 0.8rem; }
figure { margin: 0; padding: 0.7rem 0.8rem; } figcaption { color: var(--soft); font-size: 0.8rem; }
svg { display: block; width: 100%; height: auto; } svg text { font-family: inherit !important; }
.scroll { overflow-x: auto; max-height: 30rem; overflow-y: auto; border: 1px solid var(--grid); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.7rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--grid); }
th { position: sticky; top: 0; background: var(--card); font-weight: 600; } tr:last-child td { border-bottom: 0; }
td.number, th.number { text-align: right; white-space: nowrap; } td { overflow-wrap: break-word; }
td.name { white-space: nowrap; }
pre { margin: 0; padding: 0.7rem; overflow-x: auto; background: var(--card); border-radius: 6px; }
summary { cursor: pointer; } .swatch { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 2px;
  margin-right: 0.4em; }
@media print { .scroll { max-height: none; } }
"""
# Nothing is fetched, whatever is in the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
MARK = POLICY.encode()  # tells our pages from the user's


def page(title: str, *parts: str) -> str:
    """Return a whole document."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{said(title)}</title><style>{STYLE}</style></head><body>",
            *filter(None, parts),
            "</body></html>\n",
        ]
    )


def said(value: object) -> str:
    """Return the text with nothing in it that HTML would read, and nothing that UTF-8 cannot hold."""
    return html.escape(str(value).encode("utf-8", "replace").decode())


def cards(values: Iterable[tuple[str, str]]) -> str:
    """Return the numbers that are seen first; what is unknown (`-`) is left out."""
    shown = [f'<div class="card"><span class="soft">{said(name)}</span><b>{said(value)}</b></div>'
             for name, value in values if value != "-"]  # fmt: skip
    return f'<div class="cards">{"".join(shown)}</div>'


def figures(charts: Iterable[tuple[str, str, str]]) -> str:
    """Return plots (title, SVG, note) in two columns, or one where there is no room."""
    shown = [f"<figure><h3>{said(title)}</h3>{svg}<figcaption>{said(note)}</figcaption></figure>"
             for title, svg, note in charts]  # fmt: skip
    return f'<div class="plots">{"".join(shown)}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """Return a table of texts; the columns in `numbers` are aligned to the right.

    The first column is not broken into lines. A cell that is `Html` is HTML already.
    """
    if not rows:
        return ""
    kind = {0: ' class="name"'} | {place: ' class="number"' for place in numbers}
    head = "".join(f"<th{kind.get(place, '')}>{said(name)}</th>" for place, name in enumerate(header))
    body = "".join(f"<tr>{''.join(_cell(each, kind.get(place, '')) for place, each in enumerate(row))}</tr>"
                   for row in rows)  # fmt: skip
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


class Html(str):
    """A text that is HTML already."""


def _cell(value: str, kind: str) -> str:
    return f"<td{kind}>{value if isinstance(value, Html) else said(value)}</td>"


def section(title: str, content: str, *, folded: bool = False) -> str:
    """Return a part of the page with a heading; nothing without content."""
    if not content:
        return ""
    if folded:
        return f"<h2>{said(title)}</h2><details><summary>show</summary>{content}</details>"
    return f"<h2>{said(title)}</h2>{content}"


def when(seconds: float) -> str:
    """Return a time of day in the machine's zone."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds)).strip()
    except (ValueError, OverflowError, OSError):  # no time that a calendar has
        return f"{seconds:g}"


def framed(page: str) -> str:
    """Return a page as a part of another one, such as a notebook."""
    return f'<iframe srcdoc="{html.escape(page)}" style="width: 100%; height: 800px; border: 0"></iframe>'


class Page(type(Path())):  # type: ignore[misc]
    """The path of a page, which a notebook shows as the page itself."""

    def _repr_html_(self) -> str:
        return framed(self.read_text(encoding="utf-8"))


def write(path: Path, text: str) -> Path:
    """Write the page; one of this package that was there is replaced when the new one is whole.

    Returns:
        Its path, which a notebook shows as the page.

    Raises:
        FileExistsError: Something else is there.
        OSError: It cannot be written.
    """
    if path.exists() and MARK not in path.read_bytes()[:4096]:
        raise FileExistsError(errno.EEXIST, "expected a page of faststep or nothing, found something else", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return Page(path)
