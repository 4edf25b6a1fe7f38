"""The page's style sheet: colours as variables, one set for light theme and print, one for the dark theme."""

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
svg.chart {{ max-width: 100%; height: auto; display: block; }}
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
