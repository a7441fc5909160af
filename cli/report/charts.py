"""Charts as inline SVG: residuals by layer and head, by layer, and by bits."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bpc_cli.report.markup import Html, element
from bpc_cli.report.style import STEPS

__all__ = ["Curves", "Dots", "change_map", "curve_chart", "heat_map", "layer_chart"]

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1000, 44, 16, 14, 40
HEIGHT = 280


class Dots(NamedTuple):
    """One residual per layer, and the least and greatest of its heads where they are shown."""

    name: str
    style: str  # classes of the dots
    values: Mapping[int, float]
    ranges: Mapping[int, tuple[float, float]] | None = None


class Curves(NamedTuple):
    """The mean residual after 0, 1, ... bits (or parts of some bits), and that of every layer."""

    name: str
    style: str
    bits_per_step: int
    mean: Sequence[float]
    layers: Mapping[int, Sequence[float]]


def heat_map(values: Mapping[int, Sequence[float]], limit: float) -> Html:
    """Residuals by layer (from left to right) and head (downwards), from 0 to 1; those of `limit` or more have a frame.

    Args:
        values: one residual per head of each layer.
        limit: the residual from which codes say little.
    """
    return _map(values, limit, "s", _step, _short)


def change_map(values: Mapping[int, Sequence[float]], widest: float) -> Html:
    """Differences of residuals by layer and head, from -`widest` to `widest`."""
    return _map(
        values, math.inf, "d", lambda value: _step(0.5 + value / 2 / widest), lambda value: _short(value, sign=True)
    )


def layer_chart(series: Sequence[Dots], limit: float) -> Html:
    """Residuals by layer, one column per layer with the dots of every series side by side."""
    layers = list(series[0].values)
    ends = [end for each in series if each.ranges for pair in each.ranges.values() for end in pair]
    top = _top([*ends, *(value for each in series for value in each.values.values())])
    width = max(WIDTH, LEFT + RIGHT + 5.5 * len(layers) * len(series))
    room = (width - LEFT - RIGHT) / len(layers)
    parts = _frame(width, top, limit)
    radius = 4.5 if room > 12 * len(series) else 3.5 if room > 7 * len(series) else 2.8
    for place, layer in enumerate(layers):
        middle = LEFT + room * (place + 0.5)
        if place % max(1, math.ceil(26 / room)) == 0:
            parts.append(_text(middle, HEIGHT - BOTTOM + 18, str(layer), text_anchor="middle"))
        for number, each in enumerate(series):
            x = middle + (number - (len(series) - 1) / 2) * min(14.0, room / len(series))
            name = f"layer {layer}, {each.name}: {_long(each.values[layer])}"
            if each.ranges is not None:
                low, high = each.ranges[layer]
                name += f", heads from {_long(low)} to {_long(high)}"
                span = {"x1": _at(x), "x2": _at(x), "y1": _at(_y(low, top)), "y2": _at(_y(high, top))}
                parts.append(element("line", class_=each.style.split()[0], **span))
            dot = {"cx": _at(x), "cy": _at(_y(each.values[layer], top)), "r": radius}
            parts.append(element("circle", element("title", name), class_=each.style, **dot))
    parts.append(_text(LEFT + (width - LEFT - RIGHT) / 2, HEIGHT - 5, "layer", text_anchor="middle"))
    return _svg(width, parts, "Residual by layer")


def curve_chart(series: Sequence[Curves], limit: float) -> Html:
    """Residuals by bits: a bold line for the mean, and a thin one per layer; the highest and lowest have names."""
    bits, right = max(each.bits_per_step * (len(each.mean) - 1) for each in series), WIDTH - 72
    top = _top([value for each in series for line in each.layers.values() for value in line])
    parts = _frame(right + RIGHT, top, limit)

    def line(values: Sequence[float], step: int) -> str:
        points = (
            f"{_at(LEFT + (right - LEFT) * place * step / bits)} {_at(_y(value, top))}"
            for place, value in enumerate(values)
        )
        return "M" + " L".join(points)

    for tick in range(0, bits + 1, 8 if bits <= 64 else 16):
        x = LEFT + (right - LEFT) * tick / bits
        parts.append(_text(x, HEIGHT - BOTTOM + 18, str(tick), text_anchor="middle"))
    for each in series:
        for layer, values in each.layers.items():
            name = element("title", f"layer {layer}{each.name and ', ' + each.name}: {_long(values[-1])} in the end")
            parts.append(element("path", name, class_=f"{each.style} thin", d=line(values, each.bits_per_step)))
    for each in series:
        name = element("title", f"mean{each.name and ', ' + each.name}: {_long(each.mean[-1])} in the end")
        drawn = line(each.mean, each.bits_per_step)
        parts += [element("path", class_="under", d=drawn), element("path", name, class_=each.style, d=drawn)]
        last = {values[-1]: layer for layer, values in each.layers.items()}
        end = LEFT + (right - LEFT) * each.bits_per_step * (len(each.mean) - 1) / bits
        if len(series) == 1:
            apart = max(last) == min(last) or _y(min(last), top) - _y(max(last), top) > 14
            for value in {max(last), min(last)} if apart else {max(last)}:
                parts.append(_text(end + 6, _y(value, top) + 4, f"layer {last[value]}"))
    parts.append(_text(LEFT + (right - LEFT) / 2, HEIGHT - 5, "bits per key", text_anchor="middle"))
    return _svg(WIDTH, parts, "Residual by bits")


def _map(
    values: Mapping[int, Sequence[float]],
    limit: float,
    scale: str,
    step: Callable[[float], int],
    text: Callable[[float], str],
) -> Html:
    """One cell per layer and head, with the step of a scale and, where there is room, a text."""
    layers, heads = list(values), len(next(iter(values.values())))
    wide = min(56.0, max(15.0, 900 / len(layers)))
    high = 28 if heads <= 16 else 15
    parts = []
    for place, layer in enumerate(layers):
        x = LEFT + 4 + wide * place
        if place % max(1, math.ceil(22 / wide)) == 0:
            parts.append(_text(x + wide / 2, heads * high + 16, str(layer), text_anchor="middle"))
        for head, value in enumerate(values[layer]):
            shade, y = f"step {scale}{step(value)}", head * high
            title = element("title", f"layer {layer}, head {head}: {_long(value)}")
            framed = value >= limit
            edge = 1.5 if framed else 0.5
            box = {"x": _at(x + edge), "y": _at(y + edge), "width": _at(wide - 2 * edge), "height": high - 2 * edge}
            parts.append(element("rect", title, class_=shade + " high" * framed, rx=2, **box))
            if wide >= 27 and high >= 20:
                small = "11" if wide >= 34 else "10"
                parts.append(_text(x + wide / 2, y + high / 2 + 4, text(value), class_=shade, font_size=small))
    for head in range(heads):
        parts.append(_text(LEFT - 4, head * high + high / 2 + 4, str(head), text_anchor="end"))
    width, height = LEFT + 4 + wide * len(layers) + 4, heads * high + 38
    parts.append(_text(LEFT + 4 + wide * len(layers) / 2, height - 5, "layer", text_anchor="middle"))
    turned = f"rotate(-90 11 {_at(heads * high / 2)})"
    parts.append(_text(11, heads * high / 2 + 4, "head", text_anchor="middle", transform=turned))
    sizes = {"width": _at(width), "height": _at(height), "view_box": f"0 0 {_at(width)} {_at(height)}"}
    return element("svg", *parts, role="img", aria_label="Residual by layer and head", **sizes)


def _frame(width: float, top: float, limit: float) -> list[Html]:
    """The lines and numbers of the vertical axis, and the limit."""
    parts, ticks = [], 4 if f"{top:e}"[0] in "24" else 5
    for tick in range(ticks + 1):
        value = top * tick / ticks
        y = _at(_y(value, top))
        parts.append(element("line", class_="grid", x1=LEFT, x2=_at(width - RIGHT), y1=y, y2=y))
        parts.append(_text(LEFT - 8, _y(value, top) + 4, f"{value:.3g}", text_anchor="end"))
    y = _at(_y(limit, top))
    parts.append(element("line", class_="limit", x1=LEFT, x2=_at(width - RIGHT), y1=y, y2=y))
    return parts


def _svg(width: float, parts: list[Html], label: str) -> Html:
    # Wider charts keep their size and are scrolled.
    style = None if width == WIDTH else f"min-width: {width}px"
    view = f"0 0 {width} {HEIGHT}"
    return element("svg", *parts, class_="wide", role="img", aria_label=label, view_box=view, style=style)


def _text(x: float, y: float, text: str, **attributes: object) -> Html:
    return element("text", text, x=_at(x), y=_at(y), **attributes)


def _y(value: float, top: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top)


def _top(values: Sequence[float]) -> float:
    """The end of an axis that begins at 0: 1, or a round number above the values."""
    most = max(values)
    if most <= 1:
        return 1
    power = 10.0 ** math.floor(math.log10(most))
    return next(power * factor for factor in (1, 2, 4, 5, 10) if power * factor >= most)


def _step(share: float) -> int:
    return min(STEPS - 1, max(0, round(share * (STEPS - 1))))


def _short(value: float, *, sign: bool = False) -> str:
    """A number for a small cell, such as .44 or +.03."""
    if abs(value) >= 9.995:
        return f"{value:.0e}"
    text = f"{value:+.2f}" if sign else f"{value:.2f}"
    return text.replace("0.", ".", 1)


def _long(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.3g}"


def _at(place: float) -> str:
    return f"{place:.1f}".removesuffix(".0")
