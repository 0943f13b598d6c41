"""The report in its forms: one HTML page, Markdown, JSON. All three are laid out from the same sections."""

from __future__ import annotations

import json
from pathlib import Path

from mtpdeploy.report.export import cell
from mtpdeploy.report.html import page
from mtpdeploy.report.sections import Section, Table, failures, headline, sections, verdicts
from mtpdeploy.report.story import Story

FORMATS = ("html", "md", "json")


def written(story: Story, format: str, folder: Path | None = None) -> str:
    """`format` is one of FORMATS. folder: where the file will lie, for links to the raw data."""
    if format == "md":
        return markdown(story)
    return json.dumps(document(story), indent=2, ensure_ascii=False) + "\n" if format == "json" else page(story, folder)


def document(story: Story) -> dict[str, object]:
    """The figures as numbers (`comparisons`, `frontier`, `series`) and the sections as they are printed."""
    return {
        "title": story.title,
        "simulated": story.simulated,
        "damaged": list(story.damaged),
        "failures": list(failures(story)),
        "verdicts": [
            {"verdict": one.word, "text": one.text, "not_like_for_like": list(one.unlike), "notes": list(one.notes)}
            for one in verdicts(story)
        ],
        "headline": [{"what": what, "value": value, "unit": unit} for what, value, unit in headline(story)],
        "comparisons": [one.as_json() for one in story.comparisons],
        "frontier": story.frontier.as_json() if story.frontier else None,
        "sections": [_section(one) for one in sections(story)],
    }


def _section(one: Section) -> dict[str, object]:
    return {
        "id": one.id,
        "heading": one.heading,
        "text": list(one.text),
        "tables": [
            {"caption": table.caption, "columns": list(table.heads), "rows": [list(row) for row in table.rows]}
            for table in one.tables
        ],
        "plots": [
            {
                "caption": plot.caption,
                "description": plot.description,
                "series": [{"label": line.label, "x": list(line.x), "y": list(line.y)} for line in plot.series],
            }
            for plot in one.plots
        ],
    }


def markdown(story: Story) -> str:
    """What was not alike and the verdict first, then every table of the page."""
    lines = [f"# {cell(story.title)}", ""]
    if story.simulated:
        lines += ["**Simulated: these numbers come from the simulated SGLang. No GPU was measured.**", ""]
    lines += [f"- left out: {cell(one)}" for one in story.damaged]
    for verdict in verdicts(story):
        lines += [f"- not like for like: {cell(one)}" for one in verdict.unlike]
        lines += ["", f"**{verdict.word}**: {cell(verdict.text)}.", ""]
        lines += [f"- {cell(one)}" for one in verdict.notes]
    lines += [f"- **failed**: {cell(one)}" for one in failures(story)]
    lines += [f"- {cell(what)}: {cell(value)} {unit}" for what, value, unit in headline(story)]
    for one in sections(story):
        lines += ["", f"## {one.heading}", ""]
        lines += [f"{cell(text)}\n" for text in one.text]
        lines += [f"{cell(plot.caption)}: {cell(plot.description)}\n" for plot in one.plots if not one.tables]
        for table in one.tables:
            lines += _table(table)
    units = "tok/s are output tokens per second, never chunks; GiB are 2^30 bytes; a dash means unknown; intervals hold 95 %."
    return "\n".join([*lines, "", units, ""])


def _table(table: Table) -> list[str]:
    marks = ["---"] * (len(table.heads) - table.numeric) + ["---:"] * table.numeric
    rows = [f"| {' | '.join(cell(text) for text in row)} |" for row in table.rows]
    return [
        cell(table.caption),
        "",
        f"| {' | '.join(cell(head) for head in table.heads)} |",
        f"|{'|'.join(marks)}|",
        *rows,
        "",
    ]
