#pragma once

namespace sherd::cli {

/// The stylesheet of report_page(). Colours of draw() are those of the light page; here are the dark one's.
inline constexpr const char* page_style = R"css(
:root { --ground: #ffffff; --text: #222222; --quiet: #5a5a5a; --line: #d8d8d8; --panel: #f6f6f6; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 84rem; background: var(--ground); color: var(--text);
       font: 1rem/1.45 system-ui, 'DejaVu Sans', Helvetica, sans-serif; }
h1 { font-size: 1.5rem; margin: 0.5rem 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 0.6rem; }
table { border-collapse: collapse; }
th, td { padding: 0.25rem 0.9rem 0.25rem 0; text-align: left; vertical-align: top;
         border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
th { font-weight: 600; }
.facts th { color: var(--quiet); font-weight: 400; min-width: 8.5rem; overflow-wrap: normal; }
.wide { overflow-x: auto; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; overflow: hidden; break-inside: avoid;
         background: var(--ground); }
figure svg { display: block; width: 100%; height: auto; }
figure svg:focus-visible { outline: 2px solid #4477aa; outline-offset: -2px; }
.readout { padding: 0 0.9rem 0.5rem; min-height: 1.9rem; font-size: 0.85rem; color: var(--quiet);
           font-variant-numeric: tabular-nums; }
.remark { padding: 0.5rem 0.9rem; background: var(--panel); border-left: 4px solid #997700; }
pre { margin: 0; padding: 0.7rem 0.9rem; background: var(--panel); border-radius: 6px; overflow-x: auto;
      white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.85rem; }
.config { max-height: 32rem; overflow-y: auto; white-space: pre; }
.sample { margin-bottom: 0.8rem; break-inside: avoid; }
.prompt { background: none; color: var(--quiet); }
.hair { stroke: var(--quiet); stroke-dasharray: 2 3; }
@media (max-width: 34rem) {
  body { padding: 0.6rem; }
  figure svg text:not([font-weight]) { font-size: 15px; }
  .facts th { min-width: 6rem; }
}
@media screen and (prefers-color-scheme: dark) {
  :root { --ground: #16181b; --text: #e4e4e4; --quiet: #a8a8a8; --line: #3a3d42; --panel: #202327; }
  svg { fill: #e4e4e4; }
  .ground { fill: #16181b; } .grid { stroke: #30343a; } .axis { stroke: #a8a8a8; }
  .c0 { stroke: #77aadd; } .c1 { stroke: #ee8866; } .c2 { stroke: #66c27c; }
  .c3 { stroke: #dd88bb; } .c4 { stroke: #d6b84a; } .c5 { stroke: #66bbcc; }
  .f0 { fill: #77aadd; } .f1 { fill: #ee8866; } .f2 { fill: #66c27c; }
  .f3 { fill: #dd88bb; } .f4 { fill: #d6b84a; } .f5 { fill: #66bbcc; }
}
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .figures { grid-template-columns: 1fr 1fr; }
  .config { max-height: none; white-space: pre-wrap; }
  .readout { display: none; }
}
)css";

/// Tells the values under the pointer, or where the arrow keys have led, from what draw() left in the
/// pictures.
inline constexpr const char* page_script = R"js(
for (const svg of document.querySelectorAll('figure svg')) {
  const words = svg.dataset.frame.split(' ');
  const [xLow, xHigh, yLow, yHigh, left, right, top, bottom, logarithmic, divisor] = words.map(Number);
  const unit = words.slice(10).join(' ');
  const curves = [...svg.querySelectorAll('polyline[data-name]')].map(curve => ({
    name: curve.dataset.name,
    points: curve.getAttribute('points').trim().split(' ').map(point => point.split(',').map(Number))}));
  const caption = svg.parentNode.querySelector('.readout');
  const hair = document.createElementNS('http://www.w3.org/2000/svg', 'path');
  hair.setAttribute('class', 'hair');
  svg.append(hair);
  const value = y => {
    const part = (bottom - y) / (bottom - top);
    return (logarithmic ? yLow * (yHigh / yLow) ** part : yLow + part * (yHigh - yLow)) / divisor;
  };
  let at = right;
  const stepAt = x => Math.round(xLow + (x - left) / (right - left) * (xHigh - xLow));
  const show = x => {
    at = Math.min(right, Math.max(left, x));
    let step = null;
    const texts = [];
    for (const {name, points} of curves) {
      const near = points.reduce((best, p) => Math.abs(p[0] - at) < Math.abs(best[0] - at) ? p : best);
      if (step === null) step = near[0];
      const where = stepAt(near[0]) === stepAt(step) ? '' : ` (step ${stepAt(near[0])})`;
      texts.push(`${name} ${Number(value(near[1]).toPrecision(4))}${unit ? ' ' + unit : ''}${where}`);
    }
    if (step === null) return;
    hair.setAttribute('d', `M${step} ${top}V${bottom}`);
    caption.textContent = `step ${stepAt(step)}: ${texts.join(', ')}`;
  };
  const hide = () => { hair.removeAttribute('d'); caption.textContent = '\u00a0'; };
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect();
    show((event.clientX - box.left) / box.width * svg.viewBox.baseVal.width);
  });
  svg.addEventListener('pointerleave', hide);
  svg.tabIndex = 0;
  svg.addEventListener('focus', () => show(at));
  svg.addEventListener('blur', hide);
  svg.addEventListener('keydown', event => {
    const way = {ArrowLeft: -3, ArrowRight: 3}[event.key];
    if (way) { event.preventDefault(); show(at + way); }
  });
}
)js";

}  // namespace sherd::cli
