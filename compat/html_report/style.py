"""The look of the pages: system fonts, light and dark, blue against orange."""

STYLE = """
:root {
  color-scheme: light dark;
  --bg: #f6f7f8; --card: #fff; --ink: #1b2127; --soft: #56616b; --line: #d9dee3;
  --stripe: #1b21270a; --hit: #1b212718;
  --pass: #0072b2; --fail: #b34700; --mark: #d55e00; --warn: #8a6100; --quiet: #56616b;
  --band: #56b4e938; --edge: #56b4e9; --source: #f1f3f5;
  --same: #e6eaee; --low: #93c7ea; --high: #3f95cf;
  --over: #f6b26b; --far: #d55e00; --most: #7d2c00; --nan: #1b2127; --free: #b9c0c7;
  --on-over: #1b2127; --on-far: #fff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #12161a; --card: #1a1f25; --ink: #e6eaee; --soft: #a3adb8; --line: #333b44;
    --stripe: #ffffff08; --hit: #ffffff1c;
    --pass: #56b4e9; --fail: #ff9a57; --mark: #ff8a3d; --warn: #f0c75e; --quiet: #a3adb8;
    --band: #56b4e926; --edge: #2f6f96; --source: #12161a;
    --same: #2b323a; --low: #24567a; --high: #56b4e9;
    --over: #8f4310; --far: #e8752a; --most: #ffcfa3; --nan: #fff; --free: #59636d;
    --on-over: #fff; --on-far: #12161a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 72rem;
  background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
code, pre, .line { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
code { font-size: .92em; overflow-wrap: anywhere; }
h1 { margin: 0; font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 2.25rem 0 .75rem; font-size: 1.2rem; overflow-wrap: anywhere; }
h3 { margin: 0 0 .25rem; font-size: 1rem; }
h4 { margin: .75rem 0 .25rem; font-size: .9rem; font-weight: 600; }
p { margin: .25rem 0; overflow-wrap: anywhere; }
.kicker, .note, footer { color: var(--soft); font-size: .9rem; }
.note { max-width: 62rem; }
footer { margin-top: 2rem; }
.card, .verdict {
  margin: .75rem 0; padding: 1rem 1.15rem; background: var(--card);
  border: 1px solid var(--line); border-radius: 10px;
}
.verdict { display: flex; gap: .9rem; align-items: flex-start; border-left-width: 6px; }
.verdict .sign { font-size: 1.7rem; line-height: 1.1; font-weight: 700; }
.verdict strong { font-size: 1.1rem; }
.verdict > div { min-width: 0; }
.good { border-left-color: var(--pass); }
.bad { border-left-color: var(--mark); }
.good .sign, .good strong { color: var(--pass); }
.bad .sign, .bad strong { color: var(--fail); }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(8.6rem, 1fr));
  gap: .6rem; margin: .75rem 0;
}
.tiles > div {
  padding: .55rem .8rem; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px;
}
.tiles dt { color: var(--soft); font-size: .82rem; }
.tiles dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
.tall { max-height: 34rem; overflow-y: auto; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.pair { gap: 0 1.5rem; }
.pair > div { min-width: 0; }
svg { display: block; width: 100%; height: auto; }
svg.errors { min-width: 54rem; }
svg.heat { min-width: 25rem; }
svg text { fill: var(--soft); font-size: 12.5px; font-variant-numeric: tabular-nums; }
svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; }
svg .first { fill: var(--fail); font-weight: 600; }
svg .first { paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round; }
.stripe { fill: var(--stripe); }
.grid { stroke: var(--line); stroke-width: 1; }
.band { fill: var(--band); }
.edge { fill: none; stroke: var(--edge); stroke-width: 1.2; }
.hit { fill: transparent; }
.hit:hover { fill: var(--hit); }
circle { pointer-events: none; }
.pass { fill: var(--pass); }
.free { fill: var(--soft); }
.same { fill: var(--card); stroke: var(--pass); stroke-width: 1.2; }
.fail { fill: none; stroke: var(--mark); stroke-width: 2; pointer-events: none; }
.heat rect:hover { stroke: var(--ink); stroke-width: 1.5; }
.c-same { fill: var(--same); } .c-low { fill: var(--low); } .c-high { fill: var(--high); }
.c-over { fill: var(--over); } .c-far { fill: var(--far); } .c-most { fill: var(--most); }
.c-nan { fill: var(--nan); } .c-free { fill: var(--free); }
[class^="x-"] { fill: none; stroke: var(--on-far); stroke-width: 1.5; pointer-events: none; }
.x-c-over { stroke: var(--on-over); }
.legend {
  display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .4rem 0; padding: 0;
  list-style: none; color: var(--soft); font-size: .85rem;
}
.legend li { display: flex; gap: .4rem; align-items: center; }
.legend svg { width: 1rem; flex: none; }
table { width: 100%; border-collapse: collapse; font-size: .88rem; }
th, td { padding: .3rem .7rem .3rem 0; text-align: left; vertical-align: top; }
thead th { position: sticky; top: 0; background: var(--card); color: var(--soft); }
tbody tr { border-top: 1px solid var(--line); }
tbody th { font-weight: 400; }
td { font-variant-numeric: tabular-nums; }
td code, th code { overflow-wrap: normal; white-space: nowrap; }
summary { cursor: pointer; font-weight: 600; }
pre {
  margin: .5rem 0; padding: .6rem .8rem; overflow-x: auto; background: var(--source);
  border-radius: 6px; font-size: .88rem; line-height: 1.45;
}
.line { color: var(--soft); margin-right: 1rem; user-select: none; }
.finding { border-left-width: 6px; }
.finding header { display: flex; flex-wrap: wrap; gap: .3rem .75rem; align-items: baseline; }
.finding h3 { margin: 0; }
.finding dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 0; }
.finding dt { color: var(--soft); }
.finding dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
.badge { font-size: .85rem; font-weight: 700; }
.breaks { border-left-color: var(--mark); } .breaks .badge { color: var(--fail); }
.drifts { border-left-color: #e69f00; } .drifts .badge { color: var(--warn); }
.style { border-left-color: var(--line); } .style .badge { color: var(--quiet); }
@media (max-width: 30rem) {
  .finding dl { grid-template-columns: 1fr; gap: 0; }
  .finding dd { margin-bottom: .3rem; }
  .card, .verdict { padding: .85rem .9rem; }
}
@media print { .tall { max-height: none; } .card, .verdict { break-inside: avoid; } }
"""
