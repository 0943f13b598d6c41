"""Plots as SVG for the page: drawn by Matplotlib, coloured by the page.

Matplotlib gets stand-in colours that are then replaced by CSS variables, so one drawing serves the light and the dark
page.
Text stays text: it scales and can be searched. `name` keeps the ids of several plots on a page apart.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Stand-ins: colours that Matplotlib would never choose by itself. The series' own are in the page's style.
INK, FAINT = "#010203", "#040506"
SERIES = ("#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05", "#0a0b06", "#0a0b07", "#0a0b08")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # a second sign beside the colour
DASHES = ("-", "--", "-.", ":", "-", "--", "-.", ":")
REPLACED = {INK: "var(--ink)", FAINT: "var(--faint)", **{c: f"var(--series-{i})" for i, c in enumerate(SERIES)}}


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one line, in order of x. low and high: its band, where one is known."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    colour: int | None = None  # None: its place in the list
    dash: int | None = None


@dataclass(frozen=True, slots=True)
class Bar:
    """One stacked bar: (part, size) from the left. `label` names the bar."""

    label: str
    parts: tuple[tuple[str, float], ...]


def lines(
    name: str,
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    marked: bool = True,
) -> str:
    """Lines with bands over x, from zero; the ticks stand at the measured x where they are few. marked: a sign a point."""

    def draw(axes: Axes) -> None:
        for index, one in enumerate(series[: len(SERIES)]):
            colour = SERIES[index if one.colour is None else one.colour % len(SERIES)]
            dash = DASHES[index if one.dash is None else one.dash % len(DASHES)]
            axes.plot(
                one.x, one.y, color=colour, marker=MARKERS[index] if marked else None, linestyle=dash, label=_safe(one.label),
                markersize=5, linewidth=1.8,
            )  # fmt: skip
            band = [
                (a, b, c) for a, b, c in zip(one.x, one.low, one.high, strict=False) if b is not None and c is not None
            ]
            if band:
                at, low, high = zip(*band, strict=True)
                axes.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)
        if log_x:
            axes.set_xscale("log", base=2)
        ticks = sorted({at for one in series for at in one.x})
        if marked and 0 < len(ticks) <= 10:
            axes.set_xticks(ticks, [f"{at:g}" for at in ticks])
            axes.minorticks_off()
        highest = max((value for one in series for value in one.y), default=0.0)
        if highest > 0:
            axes.set_ylim(0, highest * 1.25)  # a band without bounds must not flatten the lines
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if len(series) > 1:
            axes.legend(frameon=False, labelcolor=INK)

    return _svg(name, draw)


def cloud(name: str, series: Sequence[Series], names: Sequence[Sequence[str]], *, x: str, y: str) -> str:
    """Points joined in order, each with a name beside it: the frontier."""

    def draw(axes: Axes) -> None:
        for index, (one, labels) in enumerate(zip(series[: len(SERIES)], names, strict=False)):
            colour = SERIES[index]
            axes.plot(
                one.x, one.y, color=colour, marker=MARKERS[index], linestyle=DASHES[index], label=_safe(one.label),
                markersize=6, linewidth=1.2,
            )  # fmt: skip
            for at, up, text in zip(one.x, one.y, labels, strict=False):
                axes.annotate(_safe(text), (at, up), textcoords="offset points", xytext=(6, 5), color=INK, fontsize=8)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.margins(0.1)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if len(series) > 1:
            axes.legend(frameon=False, labelcolor=INK)

    return _svg(name, draw)


def stacked(name: str, bars: Sequence[Bar], *, x: str) -> str:
    """Horizontal stacked bars; a part keeps its colour in every bar."""

    def draw(axes: Axes) -> None:
        names = list(dict.fromkeys(part for bar in bars for part, _ in bar.parts))
        for index, kind in enumerate(names):
            sizes = [dict(bar.parts).get(kind, 0.0) for bar in bars]
            starts = []
            for bar in bars:
                before = 0.0
                for part, size in bar.parts:
                    if part == kind:
                        break
                    before += size
                starts.append(before)
            axes.barh(
                range(len(bars)), sizes, left=starts, color=SERIES[index % len(SERIES)], label=_safe(kind), height=0.6,
                alpha=0.55 if index >= len(SERIES) else 0.9,
            )  # fmt: skip
        axes.set_yticks(range(len(bars)), [_safe(bar.label) for bar in bars])
        axes.invert_yaxis()
        axes.set_xlabel(x)
        axes.legend(
            frameon=False, labelcolor=INK, loc="lower left", bbox_to_anchor=(0, 1), ncols=min(3, max(1, len(names))),
            fontsize=8,
        )  # fmt: skip

    return _svg(name, draw, height=2.1 + 0.45 * len(bars))


def columns(name: str, groups: Sequence[str], series: Sequence[Series], *, y: str) -> str:
    """Grouped columns: `groups` along x, one column a series in each; x of a series counts the groups."""

    def draw(axes: Axes) -> None:
        width = 0.8 / max(1, len(series))
        for index, one in enumerate(series[: len(SERIES)]):
            at = [place + (index - (len(series) - 1) / 2) * width for place in one.x]
            axes.bar(
                at,
                one.y,
                width=width * 0.92,
                color=SERIES[index if one.colour is None else one.colour % len(SERIES)],
                label=_safe(one.label),
                alpha=0.9,
            )
        axes.set_xticks(range(len(groups)), [_safe(group) for group in groups])
        axes.set_ylabel(y)
        if len(series) > 1:
            axes.legend(frameon=False, labelcolor=INK)

    return _svg(name, draw)


def _safe(text: str) -> str:
    """Names come from outside: no line breaks, a bounded length."""
    plain = "".join(char if char.isprintable() else " " for char in text)
    return plain if len(plain) <= 40 else plain[:39] + "…"


def _svg(name: str, draw: Callable[[Axes], None], *, width: float = 6.4, height: float = 3.4) -> str:
    # The object interface: no pyplot, so no global figure list and no display.
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings: Any = {  # the type that Matplotlib declares is a union of all its names
        "svg.fonttype": "none",
        "svg.hashsalt": "mtpdeploy",  # the same data gives the same file
        "text.parse_math": False,  # names come from outside
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.grid": True,
        "grid.color": FAINT,
        "grid.alpha": 0.35,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
    }
    with rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return _for_page(out.getvalue(), name)


def _for_page(svg: str, name: str) -> str:
    """Without prologue and metadata, sized by the page, with its own ids, coloured by CSS."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<style\b.*?</style>", "", body, flags=re.DOTALL)
    opening = r'<svg viewBox="\1" aria-hidden="true" focusable="false">'
    body = re.sub(r'<svg\b[^>]*?viewBox="([^"]+)"[^>]*>', opening, body, count=1)
    for colour, variable in REPLACED.items():
        body = body.replace(colour, variable)
    # Matplotlib repeats ids from plot to plot; on one page they must differ.
    prefix = f"plot-{name}-"
    body = re.sub(r'\bid="', f'id="{prefix}', body)
    body = re.sub(r"url\(#", f"url(#{prefix}", body)
    body = re.sub(r'href="#', f'href="#{prefix}', body)
    body = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font-size: \1px", body)  # the page's own family
    return re.sub(r"(?<=\d\.\d\d)\d+", "", body)  # hundredths of a point are below a pixel
