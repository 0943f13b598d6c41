"""The report in its forms: one HTML page, Markdown, JSON. All three say the same figures."""

from __future__ import annotations

from mtpdeploy.report.story import Story

FORMATS = ("html", "md", "json")


def written(story: Story, format: str) -> str:
    """`format` is one of FORMATS."""
    from mtpdeploy.report import html

    return html.page(story)
