"""The report as one HTML page and as Markdown, from the same panels: text, drawings, tables, or one line that says why there are none.

The page loads nothing: style and drawings stand in it. It follows the reader's light or dark setting and any width of screen.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from string import Template
from typing import Any, NamedTuple

from nsa_sel.bench.core.markdown import table as markdown
from nsa_sel.bench.report import report_figures
from nsa_sel.bench.report.report_figures import DARK, LIGHT, Figure


class Table(NamedTuple):
    """Cells as text; the first `left` columns are flush left. `folded`: shown on the page when asked for."""

    caption: str
    headers: Sequence[str]
    lines: Sequence[Sequence[Any]]
    left: int
    folded: bool = False


class Panel(NamedTuple):
    """One question of the report. `missing`: why it has nothing to show, in one line."""

    name: str  # for links
    title: str
    text: str = ""
    figure: Figure | None = None
    tables: tuple[Table, ...] = ()
    missing: str = ""


class Section(NamedTuple):
    """All panels of one device."""

    device: str
    panels: tuple[Panel, ...]


def of_markdown(text: str, caption: str, left: int, folded: bool = False) -> Table:
    """A table that bench/report/summary.py wrote, cell by cell: what the page shows is what the documents show."""
    head, _, *lines = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines())
    return Table(caption, head, lines, left, folded)


def page(title: str, introduction: Sequence[str], sections: Sequence[Section], facts: Sequence[Table]) -> str:
    """The HTML page."""
    links = "".join(
        f'<li><a href="#{_anchor(sections, section, panel)}">{_text(panel.title)}</a></li>'
        for section in sections
        for panel in section.panels
    )
    body = [
        f"<h1>{_text(title)}</h1>",
        *(f"<p>{_text(line)}</p>" for line in introduction),
        f"<nav aria-label='Contents'><ul>{links}</ul></nav>",
    ]
    for section in sections:
        if len(sections) > 1:
            body.append(f"<h2 class='device'>{_text(section.device)}</h2>")
        body += [_panel_html(panel, _anchor(sections, section, panel)) for panel in section.panels]
    body.append("<section id='rows'><h2>Rows and environments</h2>" + "".join(map(_table_html, facts)) + "</section>")
    variables = ["".join(f"--{role}:{colour};" for role, colour in theme.items()) for theme in (LIGHT, DARK)]
    return _PAGE.substitute(title=_text(title), light=variables[0], dark=variables[1], body="\n".join(body))


def document(title: str, introduction: Sequence[str], sections: Sequence[Section], facts: Sequence[Table]) -> str:
    """The same as Markdown, with the PNGs that stand beside it."""
    parts = [f"# {title}", *introduction]
    for section in sections:
        if len(sections) > 1:
            parts.append(f"# {section.device}")
        for panel in section.panels:
            parts += [f"## {panel.title}", *filter(None, (panel.text, panel.missing))]
            if panel.figure:
                parts.append(picture(panel.figure.alt, image_name(sections, section, panel)))
            parts += [_table_markdown(table) for table in panel.tables]
    parts += ["## Rows and environments", *map(_table_markdown, facts)]
    return "\n\n".join(parts) + "\n"


def picture(alt: str, name: str) -> str:
    """An image in Markdown that follows the reader's light or dark setting."""
    source = f'<source media="(prefers-color-scheme: dark)" srcset="{name}-dark.png">'
    return f'<picture>{source}<img alt="{html.escape(alt)}" src="{name}.png"></picture>'


def image_name(sections: Sequence[Section], section: Section, panel: Panel) -> str:
    """The file name of a panel's PNG, without its ending."""
    return _anchor(sections, section, panel)


def _anchor(sections: Sequence[Section], section: Section, panel: Panel) -> str:
    number = [other.device for other in sections].index(section.device)
    return panel.name if number == 0 else f"{panel.name}-{number + 1}"


def _panel_html(panel: Panel, anchor: str) -> str:
    parts = [f"<section id='{anchor}'><h2>{_text(panel.title)}</h2>"]
    if panel.text:
        parts.append(f"<p>{_text(panel.text)}</p>")
    if panel.missing:
        parts.append(f"<p class='missing'>{_text(panel.missing)}</p>")
    if panel.figure:
        keys = [f"<li><span style='background:var(--{role})'></span>{_text(words)}</li>" for role, words in panel.figure.key]
        kinds = zip(panel.figure.dashes or (), ("solid", "dashed"), strict=False)
        keys += [f"<li><span class='stroke' style='border-top-style:{kind}'></span>{_text(words)}</li>" for words, kind in kinds]
        if keys:
            parts.append(f"<ul class='key' aria-label='Colours and lines'>{''.join(keys)}</ul>")
        named = panel.figure._replace(name=anchor)
        drawn = "".join(f"<div>{report_figures.svg(named, facet)}</div>" for facet in panel.figure.facets)
        parts.append(f"<figure class='facets'>{drawn}</figure>")
    parts += [_table_html(table) for table in panel.tables]
    return "\n".join([*parts, "</section>"])


def _table_html(table: Table) -> str:
    kinds = [" class='l'" if i < table.left else "" for i in range(len(table.headers))]

    def line(cells: Iterable[Any]) -> str:
        return "<tr>" + "".join(f"<td{kind}>{_text(cell)}</td>" for cell, kind in zip(cells, kinds, strict=True)) + "</tr>"

    head = "".join(f"<th scope='col'{kind}>{_text(cell)}</th>" for cell, kind in zip(table.headers, kinds, strict=True))
    rows = "\n".join(map(line, table.lines))
    caption = "" if table.folded else f"<caption>{_text(table.caption)}</caption>"
    made = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>"
    scroll = f'<div class="scroll" role="region" tabindex="0" aria-label="{html.escape(table.caption)}">{made}</div>'
    return f"<details><summary>{_text(table.caption)}</summary>{scroll}</details>" if table.folded else scroll


def _table_markdown(table: Table) -> str:
    # What a row says of itself may hold anything.
    cells = [[_text(" ".join(str(cell).split())).replace("|", "\\|") for cell in line] for line in table.lines]
    return f"{table.caption}:\n\n{markdown(table.headers, cells, table.left)}"


_text: Callable[[Any], str] = lambda value: html.escape(str(value), quote=False)  # noqa: E731

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { color-scheme: light dark; --font: system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; $light }
@media (prefers-color-scheme: dark) { :root { $dark } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--surface); color: var(--ink); font: 16px/1.5 var(--font); }
main { max-width: 82rem; margin: 0 auto; padding: 1.5rem clamp(0.9rem, 3vw, 2.5rem) 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0.3rem 0 1rem; }
h2 { font-size: 1.25rem; margin: 0 0 0.4rem; }
h2.device { font-size: 1.5rem; margin-top: 3rem; }
p { max-width: 52rem; margin: 0.4rem 0 0.8rem; }
section { border-top: 1px solid var(--grid); padding-top: 1.4rem; margin-top: 2.2rem; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; padding: 0; margin: 1rem 0 0; list-style: none; }
a { color: var(--triton-tile); }
.missing { border-left: 4px solid var(--triton-block); background: var(--shade); padding: 0.5rem 0.8rem; }
.key { display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; padding: 0; margin: 0.4rem 0; list-style: none; font-size: 0.88rem; }
.key span { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 0.2em; margin-right: 0.4em; }
.key .stroke { width: 1.6em; height: 0; border-top: 2px solid var(--muted); border-radius: 0; vertical-align: middle; }
.facets { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: 0.6rem 1.2rem; margin: 0.4rem 0; }
.facets div { max-width: 34rem; }
.facets svg { display: block; width: 100%; height: auto; stroke-linejoin: round; }
.scroll { overflow-x: auto; margin: 0.8rem 0; }
.scroll:focus-visible { outline: 2px solid var(--triton-tile); }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--muted); padding: 0 0 0.3rem; }
th, td { padding: 0.18rem 0.7rem; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
td.wrap { white-space: normal; }
th { font-weight: 600; border-bottom: 2px solid var(--muted); vertical-align: bottom; }
th.l, td.l { text-align: left; }
tbody tr:hover { background: var(--shade); }
details { margin: 0.6rem 0; }
summary { cursor: pointer; color: var(--muted); font-size: 0.9rem; }
@media print { .scroll { overflow: visible; } }
</style>
</head>
<body>
<main>
$body
</main>
</body>
</html>
""")
