"""Style sheet and script of the page. Both are inline, and their digests are in the Content-Security-Policy.

Colours are the palette of Okabe and Ito, which colour-blind people can tell apart.
"""

import base64
import hashlib

STYLE = """
:root{--bg:#fff;--card:#fff;--text:#1c2530;--soft:#5b6876;--grid:#e4e8ed;--axis:#9aa5b1;--line:#d5dbe2;
--c1:#0072b2;--c2:#d55e00;--c3:#008a64;--c4:#b0508a;--c5:#b07d00;--c6:#2f8fc9;--c7:#6b5b95;--c8:#4d4d4d;
--bad:#b3261e;--badge:#b3261e;--restart:#00765a;--warn:#8a6200;--band:#8a5a0018;--f:#0072b2;--b:#d55e00;--i:#e69f00;--w:#008a64;--chip:#eef2f6}
@media (prefers-color-scheme:dark){:root{--bg:#12161b;--card:#171d24;--text:#e6ebf0;--soft:#a3afbb;--grid:#27303a;
--axis:#5d6976;--line:#2c3641;--c1:#56b4e9;--c2:#ff9157;--c3:#2fc79a;--c4:#e59ac4;--c5:#f0c04a;--c6:#8ccdf2;
--c7:#b3a5dd;--c8:#c4c4c4;--bad:#ff8a80;--badge:#c9382e;--restart:#13805f;--warn:#94700f;--band:#f0c04a1c;--f:#4aa3d8;--b:#f07b3f;--i:#e6b040;--w:#2fb58c;--chip:#222b35}}
*{box-sizing:border-box}
html{color-scheme:light dark}
body{margin:0;background:var(--bg);color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",
"DejaVu Sans",sans-serif}
main{max-width:1164px;margin:0 auto;padding:20px 16px 48px}
h1{font-size:22px;margin:0 0 2px;overflow-wrap:anywhere;line-height:1.3}
h2{font-size:17px;margin:34px 0 10px;padding-top:6px;border-top:1px solid var(--line)}
p{margin:6px 0}
.soft,.note,.unit{color:var(--soft)}
.note{font-size:13px;margin:4px 0 0}
.unit{font-weight:400;margin-left:8px;font-size:13px}
.state{display:inline-block;padding:1px 10px;border-radius:10px;background:var(--chip);font-weight:600;font-size:13px}
.state.failed,.state.killed{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:10px;margin:16px 0 14px}
.tile{border:1px solid var(--line);border-radius:8px;padding:8px 12px;background:var(--card);min-width:0}
.tile b{display:block;font-size:19px;line-height:1.3;overflow-wrap:anywhere}
.tile span{color:var(--soft);font-size:12.5px;overflow-wrap:anywhere}
.charts{display:grid;grid-template-columns:1fr 1fr;gap:14px}
.chart{margin:0;border:1px solid var(--line);border-radius:8px;padding:10px 12px 8px;background:var(--card);position:relative;
min-width:0;break-inside:avoid}
.full{grid-column:1/-1;margin-bottom:14px}
figcaption{font-weight:600;font-size:14.5px}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:2px 0 4px;padding:0;font-size:12.5px;
color:var(--soft)}
.legend li{display:flex;align-items:center;gap:6px}
.swatch{display:inline-block;width:18px;height:0;border-top:3px solid currentColor}
.swatch.raw{opacity:.45;border-top-width:2px}
.swatch.box{height:11px;border:0;border-radius:2px}
.swatch.dashed{border-top:2px dashed var(--c1)}
.swatch.diamondkey{width:9px;height:9px;border:0;transform:rotate(45deg);background:var(--c8)}
.swatch.bestkey{width:9px;height:9px;border:0;transform:rotate(45deg);background:var(--c3)}
.swatch.key{width:15px;height:15px;border:0;border-radius:50%;color:#fff;background:var(--axis);font-size:10px;
line-height:15px;text-align:center;font-weight:700}
.swatch.key.failed,.swatch.key.killed{background:var(--badge)}.swatch.key.restart{background:var(--restart)}
.swatch.key.preempted,.swatch.key.stopped{background:var(--warn)}
.swatch.nankey{width:0;height:0;border:5px solid transparent;border-top:8px solid var(--bad);border-bottom:0}
svg{display:block;width:100%;height:auto;overflow:visible}
svg.narrow{display:none}
svg text{font-size:11.5px;fill:var(--soft)}
.tick.end,.axis-name.end{text-anchor:end}
.tick.middle,.letter,.slot-text{text-anchor:middle}
.grid{stroke:var(--grid);stroke-width:1}
.axis{stroke:var(--axis);stroke-width:1}
.line{fill:none;stroke:currentColor;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.line.raw{stroke-width:1;opacity:.45}
.repeated{stroke-dasharray:4 3;stroke-width:1.3;opacity:.7}
.dot{fill:currentColor}
.dot.faint{opacity:.5}
.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}.c5{color:var(--c5)}.c6{color:var(--c6)}
.c7{color:var(--c7)}.c8{color:var(--c8)}
.raw.c1{color:var(--c1)}
.band{fill:var(--band)}
.swatch.bandkey{height:12px;border:1px solid var(--line);background:var(--band)}
.stem{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 3}
.stem.failed,.stem.killed{stroke:var(--bad)}
.badge{fill:var(--axis)}
.badge.failed,.badge.killed{fill:var(--badge)}
.badge.restart{fill:var(--restart)}
.badge.preempted,.badge.stopped{fill:var(--warn)}
svg .letter{fill:#fff;font-weight:700;font-size:10.5px}
.diamond{fill:var(--c8)}
.diamond.best{fill:var(--c3)}
.nan{fill:var(--bad)}
.cursor{stroke:var(--axis);visibility:hidden}
.tip{position:absolute;pointer-events:none;background:var(--text);color:var(--bg);font-size:12px;line-height:1.45;
padding:4px 8px;border-radius:5px;white-space:pre;visibility:hidden;z-index:2;top:34px}
.lane{fill:var(--grid);opacity:.6}
.w-forward{fill:var(--f);background:var(--f)}.w-backward{fill:var(--b);background:var(--b)}
.w-input{fill:var(--i);background:var(--i)}.w-weight{fill:var(--w);background:var(--w)}
svg .slot-text{fill:#fff;font-size:10px}
svg .w-input-text{fill:#1c2530}
.table{overflow-x:auto;border:1px solid var(--line);border-radius:8px;background:var(--card)}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th,td{text-align:left;padding:6px 12px;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:600;white-space:nowrap}
.fit table{width:auto}
.fit{display:inline-block;max-width:100%}
tr:last-child td{border-bottom:0}
td.number,th.number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
td.text{overflow-wrap:anywhere;min-width:320px}
td.nowrap{white-space:nowrap;max-width:340px;overflow:hidden;text-overflow:ellipsis}
.chip{display:inline-block;padding:0 7px;margin-right:4px;border-radius:9px;background:var(--chip);font-size:12px}
.chip.best{background:var(--c3);color:var(--bg)}
.chip.bad{color:var(--bad);font-weight:600}
dl{display:grid;grid-template-columns:minmax(80px,max-content) minmax(0,1fr);gap:3px 16px;margin:0;font-size:14px}
dt{color:var(--soft);overflow-wrap:anywhere;max-width:300px}
dd{margin:0;overflow-wrap:anywhere}
pre{margin:0;padding:10px 12px;border:1px solid var(--line);border-radius:8px;background:var(--card);font:12.5px/1.5
ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
.sample{margin:0 0 10px}
.sample .prompt{color:var(--c1);font-weight:600}
details{margin:8px 0}
summary{cursor:pointer;color:var(--soft)}
.bar{height:22px;border-radius:6px;margin:8px 0 6px}
.bar rect.g1{fill:var(--c3)}.bar rect.g2{fill:var(--c2)}.bar rect.g3{fill:var(--c6)}.bar rect.g4{fill:var(--c4)}
.bar rect.g5{fill:var(--axis)}
.swatch.g1{background:var(--c3)}.swatch.g2{background:var(--c2)}.swatch.g3{background:var(--c6)}
.swatch.g4{background:var(--c4)}.swatch.g5{background:var(--axis)}
@media (max-width:760px){.charts{grid-template-columns:1fr}svg.wide{display:none}svg.narrow{display:block}
main{padding:14px 10px 40px}.chart{padding:8px 8px 6px}.tiles{grid-template-columns:1fr 1fr}
dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:6px}th,td{padding:5px 8px}}
@media print{.tip,.cursor{display:none}main{max-width:none}pre{max-height:none}.chart,.tile,tr{break-inside:avoid}
h2{break-after:avoid}}
"""

SCRIPT = """
"use strict";
(function(){
function number(v){var a=Math.abs(v);if(v===0)return "0";
if(a>=1e5)return v.toLocaleString("en",{maximumFractionDigits:0});
return a<1e-3?v.toExponential(2):String(+v.toPrecision(5));}
function span(s){if(s<60)return (+s.toPrecision(3))+" s";var m=Math.floor(s/60),h=Math.floor(m/60);
return h?h+" h "+(m%60)+" min":m+" min "+Math.round(s%60)+" s";}
document.querySelectorAll("svg.plot").forEach(function(svg){
var series=[],cursor=svg.querySelector(".cursor"),tip=document.createElement("div");
tip.className="tip";svg.parentNode.appendChild(tip);
svg.querySelectorAll("path[data-v]").forEach(function(path){
var place=(path.getAttribute("d").match(/[-0-9.]+ [-0-9.]+/g)||[]).map(function(p){return +p.split(" ")[0];});
var data=path.dataset.v.split(" ").map(function(p){var i=p.indexOf(":");return [+p.slice(0,i),+p.slice(i+1)];});
series.push({label:path.dataset.label+(path.classList.contains("repeated")?" (done again later)":""),place:place,
data:data});});
function hide(){tip.style.visibility=cursor.style.visibility="hidden";}
svg.addEventListener("pointerleave",hide);
svg.addEventListener("pointermove",function(event){
var box=svg.getBoundingClientRect(),view=svg.viewBox.baseVal,x=(event.clientX-box.left)*view.width/box.width;
var best=null;series.forEach(function(s){s.place.forEach(function(p){
if(best===null||Math.abs(p-x)<Math.abs(best-x))best=p;});});
if(best===null||Math.abs(best-x)>60){hide();return;}
var lines=[];series.forEach(function(s){var i=-1;s.place.forEach(function(p,k){
if(Math.abs(p-best)<1.5&&(i<0||Math.abs(p-best)<Math.abs(s.place[i]-best)))i=k;});
if(i>=0&&s.data[i]){if(!lines.length)lines.push(svg.dataset.kind==="time"?span(s.data[i][0]):"step "+
s.data[i][0].toLocaleString("en"));lines.push(s.label+": "+number(s.data[i][1]));}});
cursor.setAttribute("x1",best);cursor.setAttribute("x2",best);cursor.style.visibility="visible";
tip.textContent=lines.join("\\n");tip.style.visibility="visible";
var at=best*box.width/view.width+box.left-svg.parentNode.getBoundingClientRect().left;
var most=svg.parentNode.clientWidth-tip.offsetWidth-4;
tip.style.left=Math.max(4,at+10>most?at-tip.offsetWidth-10:at+10)+"px";});});
})();
"""


def policy() -> str:
    """Return the Content-Security-Policy: only this style sheet and this script, nothing from the network."""
    style, script = (_digest(text) for text in (STYLE, SCRIPT))
    return f"default-src 'none'; style-src '{style}'; script-src '{script}'; base-uri 'none'; form-action 'none'"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
