"""The style of a page: light and dark, on a screen of any width and on paper."""

__all__ = ["STEPS", "STYLE"]

STEPS = 11  # colours of a scale

Colour = tuple[int, int, int]
# From a residual of 0 to one of 1, and from lower through equal to higher.
LIGHT_SCALE, LIGHT_CHANGE = ("#e9f1fb", "#5b9ae3", "#0b3a75"), ("#1f66bd", "#f0efeb", "#c2500f")
DARK_SCALE, DARK_CHANGE = ("#1f2b3a", "#3575bf", "#bcdafc"), ("#62a5f2", "#30302e", "#ee8344")

_LIGHT = """
  --ground: #f6f5f2; --card: #fdfdfc; --ink: #1b1b19; --quiet: #65635d; --line: #e2e0da; --mark: #eef3fa;
  --one: #2470c8; --two: #d2570f; --warn: #b3261e;
"""
_DARK = """
  --ground: #131312; --card: #1c1c1a; --ink: #f0efea; --quiet: #a09e96; --line: #35342f; --mark: #202a36;
  --one: #5a9fee; --two: #f08a4b; --warn: #ff8a80;
"""
_RULES = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 36px 20px 48px; }
h1 { margin: 0; font-size: 28px; line-height: 1.25; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { margin: 0 0 2px; font-size: 18px; line-height: 1.35; }
h3 { margin: 18px 0 6px; font-size: 14px; font-weight: 600; overflow-wrap: anywhere; }
p { margin: 6px 0; max-width: 78ch; overflow-wrap: anywhere; }
.above { color: var(--quiet); font-size: 13px; margin: 0 0 4px; }
.below, .lead { color: var(--quiet); margin: 4px 0 0; }
section, .verdict { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 20px 22px;
  margin-top: 18px; min-width: 0; }
.verdict { border-left: 4px solid var(--one); }
.verdict.warn { border-left-color: var(--warn); }
.verdict p { margin: 2px 0; max-width: none; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(136px, 1fr)); gap: 12px; margin-top: 18px; }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; }
.figures b { display: block; font-size: 24px; font-weight: 600; line-height: 1.25; white-space: nowrap; }
.figures span { color: var(--quiet); font-size: 13px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr)); gap: 18px; }
.scroll { overflow-x: auto; margin-top: 10px; }
.maps { display: flex; flex-wrap: wrap; gap: 8px 36px; }
.maps > * { min-width: 0; max-width: 100%; }
figure { margin: 0; }
figcaption { font-size: 13px; font-weight: 600; margin-top: 10px; }
svg { display: block; font-size: 12px; font-family: inherit; }
svg.wide { width: 100%; min-width: 820px; height: auto; }
svg text { fill: var(--quiet); font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); stroke-width: 1; }
.limit { stroke: var(--warn); stroke-width: 1; stroke-dasharray: 4 4; }
svg text.limit-name { fill: var(--warn); stroke: none; }
.one { --own: var(--one); } .two { --own: var(--two); }
circle.one, circle.two { fill: var(--own); }
circle.hollow { fill: var(--card); stroke: var(--own); stroke-width: 2; }
line.one, line.two { stroke: var(--own); stroke-width: 5; stroke-linecap: round; opacity: .28; }
path { fill: none; stroke-linejoin: round; }
path.one, path.two { stroke: var(--own); stroke-width: 2.5; }
path.under { stroke: var(--card); stroke-width: 6; opacity: .8; }
path.thin { stroke: var(--own); stroke-width: 1.2; opacity: .5; }
.keys { display: flex; flex-wrap: wrap; gap: 4px 20px; font-size: 13px; color: var(--quiet); margin-top: 8px;
  align-items: center; }
.keys span { display: inline-flex; align-items: center; gap: 7px; }
.keys i { width: 11px; height: 11px; border-radius: 50%; background: var(--own); flex: none; }
.keys i.hollow { background: none; border: 2px solid var(--own); }
.keys i.bar { width: 5px; height: 15px; border-radius: 3px; opacity: .35; }
.keys i.rule { width: 18px; height: 3px; border-radius: 2px; }
.keys i.thin { width: 18px; height: 1px; border-radius: 0; opacity: .6; }
.keys i.step { width: 15px; height: 11px; border-radius: 0; background: var(--fill); margin-right: -7px; }
.keys i.dashed { background: none; border-top: 2px dashed var(--warn); width: 20px; height: 0; border-radius: 0; }
.keys i.edge { background: none; border: 2px solid var(--warn); border-radius: 3px; width: 15px; height: 13px; }
rect.step { fill: var(--fill); }
rect.high { stroke: var(--warn); stroke-width: 2; }
svg text.step { fill: var(--on); text-anchor: middle; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 14px 5px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { color: var(--quiet); font-weight: 500; white-space: nowrap; }
thead th { vertical-align: bottom; }
.numbers td + td, .numbers th + th { text-align: right; padding: 5px 0 5px 18px; white-space: nowrap; }
.facts { width: 100%; }
.facts td { overflow-wrap: anywhere; }
.facts th { width: 1%; }
.sources td { white-space: nowrap; }
tr.mark td { font-weight: 600; }
.differs td { background: var(--mark); }
.facts.differs td { padding-left: 8px; }
td .bar { display: inline-block; height: 8px; border-radius: 4px; background: var(--one); margin-right: 8px; }
td.share { white-space: nowrap; }
code { font: 12.5px/1.5 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.tag { display: inline-flex; width: 22px; height: 22px; border-radius: 6px; background: var(--own); color: var(--card);
  align-items: center; justify-content: center; font-size: 13px; font-weight: 700; margin-right: 8px; flex: none; }
details { margin-top: 14px; }
summary { cursor: pointer; color: var(--quiet); font-size: 13.5px; }
footer { color: var(--quiet); font-size: 13px; margin-top: 22px; }
@media print { body { background: none; } section, .verdict, .figures div { break-inside: avoid; } }
@media (max-width: 520px) { main { padding: 20px 12px 32px; } section, .verdict { padding: 16px 14px; } }
"""


def _rgb(text: str) -> Colour:
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def _between(first: Colour, second: Colour, share: float) -> Colour:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, second, strict=True))
    return red, green, blue


def _on(colour: Colour) -> str:
    """Black or white, whichever contrasts more with a colour (relative luminance of WCAG)."""
    linear = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in colour]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#101010" if luminance > 0.179 else "#ffffff"


def _steps(name: str, anchors: tuple[str, str, str]) -> str:
    low, middle, high = map(_rgb, anchors)
    rules, last = [], STEPS - 1
    for step in range(STEPS):
        share = 2 * step / last
        colour = _between(low, middle, share) if share <= 1 else _between(middle, high, share - 1)
        rules.append(f".{name}{step} {{ --fill: #{''.join(f'{part:02x}' for part in colour)}; --on: {_on(colour)}; }}")
    return "\n".join(rules)


STYLE = (
    f":root {{ color-scheme: light dark; {_LIGHT} }}\n{_steps('s', LIGHT_SCALE)}\n{_steps('d', LIGHT_CHANGE)}\n"
    f"@media (prefers-color-scheme: dark) {{\n:root {{ {_DARK} }}\n"
    f"{_steps('s', DARK_SCALE)}\n{_steps('d', DARK_CHANGE)}\n}}\n{_RULES}"
)
