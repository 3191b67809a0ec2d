"use strict";
// What the figures and the timeline share: uPlot's axes, colours of the page, zoom by dragging, a tip under the pointer.
// Text of a trace or a result only ever becomes pixels or text nodes, never markup.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const carried = () => JSON.parse(document.getElementById("data").textContent);

// Fills `box` with a plot area that is as wide as the box, and returns `redraw`. All sizes are in CSS pixels.
//   x, y      axes: label, log, down (the smallest value on top), percent, ticks as [value, text] or none, grid, size
//   shown     the object {x: [from, to], y: [from, to]} that is on the screen; the caller changes it, then calls redraw
//   height, top   of the whole and of the room above the plot area
//   draw, above   draw on a canvas whose origin is the plot area's left top corner: cut off at its edges, not cut off
//   zoomed    is called with the ranges that were dragged over, or with null after a double click
//   zooms     "x" or "xy": along what dragging zooms
//   tip       says what is at a place (of an area so wide): [a first line in bold, a second line], or null
function chart(box, { x, y, shown, height, top = 8, draw, above = () => {}, zoomed, zooms = "x", tip }) {
  const font = "12px " + getComputedStyle(document.body).fontFamily;
  const paint = (u, drawing, cut) => {
    const ctx = u.ctx, ratio = devicePixelRatio;
    const [wide, high] = [u.bbox.width / ratio, u.bbox.height / ratio];
    ctx.save();
    ctx.translate(u.bbox.left, u.bbox.top);
    ctx.scale(ratio, ratio);
    ctx.beginPath();
    ctx.rect(0, 0, wide, high);
    if (cut) ctx.clip();
    Object.assign(ctx, { font, textAlign: "left", textBaseline: "alphabetic" });
    drawing(ctx, { wide, high, px: (value) => u.valToPos(value, "x"), py: (value) => u.valToPos(value, "y") });
    ctx.restore();
  };
  const scale = (name, axis) => ({ time: false, distr: axis.log ? 3 : 1, dir: axis.down ? -1 : 1, range: () => shown[name] });
  const plot = new uPlot({
    width: box.clientWidth,
    height,
    padding: [top, 10, 0, 0],
    scales: { x: scale("x", x), y: scale("y", y) },
    axes: [{ scale: "x", side: 2, size: 28, ...axisLook(x, font) }, { scale: "y", side: 3, size: 46, ...axisLook(y, font) }],
    series: [{}, { scale: "y", paths: () => null, points: { show: false } }],
    legend: { show: false },
    cursor: {
      y: false,
      points: { show: false },
      drag: { x: true, y: zooms === "xy", uni: 30, dist: 4, setScale: false },
      bind: { dblclick: () => () => zoomed(null) },
    },
    hooks: {
      draw: [(u) => { paint(u, draw, true); paint(u, above, false); }],
      setSelect: [(u) => {
        const { left, top: from, width, height: high } = u.select;
        u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        const ends = [u.posToVal(from, "y"), u.posToVal(from + high, "y")].sort((a, b) => a - b);
        if (width > 3) zoomed({ x: [u.posToVal(left, "x"), u.posToVal(left + width, "x")], y: ends });
      }],
    },
  }, [shown.x, shown.y], box);

  const redraw = () => plot.batch(() => {
    for (const name of ["x", "y"]) plot.setScale(name, { min: shown[name][0], max: shown[name][1] });
  });
  new ResizeObserver(() => {
    if (box.clientWidth && box.clientWidth !== plot.width) plot.setSize({ width: box.clientWidth, height });
  }).observe(box);
  matchMedia("screen and (prefers-color-scheme: dark)").addEventListener("change", redraw); // paper is light, too

  const label = document.createElement("div");
  label.className = "tip";
  label.hidden = true;
  box.append(label);
  plot.over.addEventListener("pointermove", (event) => {
    const area = plot.over.getBoundingClientRect();
    const [left, down] = [event.clientX - area.left, event.clientY - area.top];
    const said = tip(left, down, area.width);
    label.hidden = !said;
    if (!said) return;
    const bold = document.createElement("b");
    bold.textContent = said[0];
    label.replaceChildren(bold, document.createElement("br"), said[1]);
    const wanted = plot.over.offsetLeft + left + 14;
    label.style.left = Math.max(0, Math.min(wanted, box.clientWidth - label.offsetWidth - 4)) + "px";
    label.style.top = plot.over.offsetTop + down + 16 + "px";
  });
  plot.over.addEventListener("pointerleave", () => { label.hidden = true; });
  return redraw;
}

function axisLook({ label, ticks = [], percent = false, grid = true, size }, font) {
  const form = { maximumFractionDigits: percent ? 1 : 6, style: percent ? "percent" : "decimal" };
  const names = new Map(ticks);
  const inside = (u, index, from, to) => {
    const seen = ticks.filter(([value]) => value >= from && value <= to);
    if (index) return seen.map(([value]) => value);
    const widest = 7 * Math.max(...seen.map(([, text]) => text.length)) + 8; // names along x must not run into each other
    const every = Math.ceil((seen.length * widest * devicePixelRatio) / u.bbox.width) || 1;
    return seen.filter((_, i) => i % every === 0).map(([value]) => value);
  };
  return {
    label, font, labelFont: font, labelSize: 24, gap: 6,
    ...(size ? { size } : {}),
    stroke: () => css("--soft"),
    grid: { show: grid, stroke: () => css("--line"), width: 1 },
    ticks: { show: false },
    filter: (u, splits) => splits,
    ...(ticks.length ? { splits: inside } : {}),
    values: (u, splits) => splits.map((value) => names.get(value) ?? value.toLocaleString("en", form).replace("-", "−")),
  };
}
