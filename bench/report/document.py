"""The report as Markdown: panels of text, a picture, tables, or one line that says why there are none."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

from nsa_sel.bench.core import markdown
from nsa_sel.bench.report.figures import Figure


class Table(NamedTuple):
    """A table in Markdown. folded: shown when asked for."""

    caption: str
    text: str
    folded: bool = False


class Panel(NamedTuple):
    """One question of the report. `missing`: why it has nothing to show, in one line."""

    name: str  # of its pictures' files
    title: str
    text: str = ""
    figure: Figure | None = None
    tables: tuple[Table, ...] = ()
    missing: str = ""


class Section(NamedTuple):
    """What is said of one device: the main results in a sentence each, the names of the panels whose pictures show them, all panels."""

    device: str
    sentences: tuple[str, ...]
    first: tuple[str, ...]
    panels: tuple[Panel, ...]


def document(title: str, notes: Sequence[str], sections: Sequence[Section], facts: Table) -> str:
    """The whole text, with the PNGs beside it: results and their pictures first, then how to read them, then the panels."""
    parts = [f"# {title}"]
    for section in sections:
        if len(sections) > 1:
            parts.append(f"# {section.device}")
        parts.append("\n".join(f"- {sentence}" for sentence in section.sentences))
        shown = [panel for name in section.first for panel in section.panels if panel.name == name and panel.figure]
        for panel in shown:
            parts += [f"**{panel.title}**", _picture(sections, section, panel)]
        parts += notes if section is sections[0] else []
        for panel in section.panels:
            parts += [f"## {panel.title}", *filter(None, (panel.text, panel.missing))]
            if panel.figure and panel not in shown:
                parts.append(_picture(sections, section, panel))
            parts += map(_table, panel.tables)
    return "\n\n".join([*parts, "## Rows and environments", _table(facts)]) + "\n"


def image_name(sections: Sequence[Section], section: Section, panel: Panel) -> str:
    """The file name of a panel's PNG, without its ending."""
    number = [other.device for other in sections].index(section.device)
    return panel.name if number == 0 else f"{panel.name}-{number + 1}"


def table_of_texts(headers: Sequence[str], lines: Sequence[Sequence[Any]], left: int) -> str:
    """A table of texts that come from files, which may hold anything: no markup, one line a cell."""
    return markdown.table(headers, [[_escaped(cell) for cell in line] for line in lines], left)


def _picture(sections: Sequence[Section], section: Section, panel: Panel) -> str:
    """An image that follows the reader's light or dark setting."""
    name = image_name(sections, section, panel)
    source = f'<source media="(prefers-color-scheme: dark)" srcset="{name}-dark.png">'
    alt = html.escape(panel.figure.alt) if panel.figure else ""
    return f'<picture>{source}<img alt="{alt}" src="{name}.png"></picture>'


def _table(table: Table) -> str:
    if table.folded:
        return f"<details><summary>{table.caption}</summary>\n\n{table.text}\n\n</details>"
    return f"{table.caption}:\n\n{table.text}"


def _escaped(cell: Any) -> str:
    return html.escape(" ".join(str(cell).split()), quote=False).replace("|", "\\|")
