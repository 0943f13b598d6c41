"""One page that needs nothing but itself: no network, light and dark, narrow and printed."""

from __future__ import annotations

import os
from pathlib import Path

from mtpdeploy.report.sections import failures, headline, sections, verdicts
from mtpdeploy.report.story import Story
from mtpdeploy.resources import environment

# Okabe and Ito's colours, told apart with every common colour blindness; lightened on the dark page.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#b0579a", "#9a7d0a", "#3a8fc2", "#7f3b08", "#5b5b5b")
DARK = ("#56b4e9", "#ff9d4d", "#2fd6a6", "#e39ccb", "#f0e442", "#9bd3f5", "#d8a071", "#bdbdbd")


def page(story: Story, folder: Path | None = None) -> str:
    """The finished HTML document. Every text of a run is escaped by the template; only our own drawings are not.

    folder: where the page will lie; raw data are linked from there. None: named without links.
    """

    def linked(path: Path) -> str | None:
        return None if folder is None else os.path.relpath(path, folder).replace(os.sep, "/")

    template = environment().get_template("report/page.html.j2")
    return template.render(
        title=story.title,
        simulated=story.simulated,
        verdicts=verdicts(story),
        headline=headline(story),
        sections=sections(story),
        damaged=story.damaged,
        failures=failures(story),
        linked=linked,
        colours=list(enumerate(LIGHT)),
        dark=list(enumerate(DARK)),
    )
