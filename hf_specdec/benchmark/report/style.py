"""The page's style sheet: colours as variables, one set for light and paper, one for dark."""

from __future__ import annotations

from hf_specdec.visualize.style import COLOURS, PICTURES

STYLE = f"""
{COLOURS}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }}
main {{ max-width: 1080px; margin: 0 auto; padding: 24px 20px 60px; }}
h1 {{ font-size: 24px; overflow-wrap: anywhere; }} h2 {{ font-size: 19px; margin-top: 40px; }} h3 {{ font-size: 15px; }}
.facts {{ padding-left: 18px; color: var(--muted); font-size: 13px; }}
.facts li {{ overflow-wrap: anywhere; }}
code {{ font-family: ui-monospace, "DejaVu Sans Mono", monospace; }}
.note {{ border-left: 4px solid var(--ink); padding: 4px 12px; background: var(--soft); }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 12px; margin: 8px 0; }}
th, td {{ padding: 3px 8px; text-align: right; border-bottom: 1px solid var(--grid); font-weight: normal; }}
.wide td {{ white-space: nowrap; }}
thead th {{ font-weight: 600; vertical-align: bottom; border-bottom: 2px solid var(--ink); }}
th:first-child, td:first-child {{ text-align: left; }}
figure {{ margin: 28px 0; }}
figcaption {{ font-weight: 600; margin-bottom: 8px; }}
.remark, .legend {{ color: var(--muted); font-size: 12px; max-width: 760px; }}
summary {{ cursor: pointer; font-size: 12px; color: var(--muted); }}
.alternative {{ overflow-x: auto; }}
svg.chart {{ max-width: 100%; height: auto; display: block; font-family: system-ui, "DejaVu Sans", sans-serif; }}
svg.chart text {{ fill: var(--ink); }}
svg.chart .tick {{ fill: var(--muted); font-size: 11px; }}
svg.chart .axis-title, svg.chart .heading {{ font-weight: 600; }}
svg.chart .value {{ font-size: 11px; paint-order: stroke; stroke: var(--paper); stroke-width: 6px; }}
.grid {{ stroke: var(--grid); }} .axis {{ stroke: var(--ink); }}
.reference {{ stroke: var(--ink); stroke-dasharray: 5 4; }}
.bar {{ fill: var(--fill); }}
.whisker {{ stroke: var(--ink); fill: none; stroke-width: 1.3; }}
.box {{ fill: var(--soft); stroke: var(--ink); }}
.median {{ stroke: var(--ink); stroke-width: 3; }}
.dot {{ fill: var(--fill); stroke: var(--ink); stroke-width: .5; }}
.curve {{ fill: none; stroke-width: 2; }}
.part {{ stroke: var(--ink); stroke-width: 1; }}
.part0 {{ fill: var(--step0); }} .part1 {{ fill: var(--step1); }} .part2 {{ fill: var(--step2); }}
.part3 {{ fill: var(--step3); }} .part4 {{ fill: var(--step4); }} .part5 {{ fill: var(--step5); }}
{"".join(f".series{index} {{ stroke: var(--series{index}); fill: var(--series{index}); }} " for index in range(8))}
polyline.curve {{ fill: none; }}
{PICTURES}
@page {{ size: landscape; margin: 12mm; }}
@media print {{
  main {{ max-width: none; padding: 0; }}
  figure, tr {{ break-inside: avoid; }}
  h2, h3, figcaption {{ break-after: avoid; }}
  .wide table {{ font-size: 10px; }} .wide th, .wide td {{ padding: 2px 4px; }}
  .wide, .alternative {{ overflow: visible; }}
  details::details-content {{ content-visibility: visible; block-size: auto; }}
}}
"""
