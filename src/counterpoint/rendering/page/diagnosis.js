// The timeline draws at most a pixel's worth of detail: for each view, the spans of a lane that fall together on the
// screen become one bar.

(function timeline() {
  const box = document.getElementById("timeline");
  if (!box) return;
  const data = carried();
  const KINDS = ["compute", "communication", "wait", "memcpy", "host"];
  const HEIGHT = { compute: 13, communication: 13, wait: 13, memcpy: 6, host: 6 };
  const COLOUR = { compute: "--compute", communication: "--transfer", wait: "--wait", memcpy: "--memcpy", host: "--host" };
  const INK = { compute: "--on-compute", communication: "--on-transfer" };
  const GAP = 2, BETWEEN_RANKS = 11, ABOVE = 26, BELOW = 52;

  const ticks = (text) => {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    return new Uint32Array(bytes.buffer);
  };
  const toMs = (tick) => (data.origin + tick * data.tick) / 1000;
  const toTick = (ms) => (ms * 1000 - data.origin) / data.tick;

  // Rows from the top: per rank host, compute, communication (wait is drawn over it), copies. One unit of y is one pixel.
  const kindOf = (name) => (KINDS.includes(name) ? name : "host");
  const lanes = data.lanes.map(({ rank, name, spans }) => {
    const [start, end, label] = spans.map(ticks);
    const reach = new Uint32Array(end.length); // latest end so far: spans of a lane may overlap
    end.reduce((latest, tick, i) => (reach[i] = Math.max(latest, tick)), 0);
    return { rank, name, kind: kindOf(name), start, end, label, reach, y: 0 };
  });
  let depth = 0;
  const bands = {};
  for (const rank of data.ranks) {
    const top = depth;
    for (const kind of ["host", "compute", "communication", "memcpy"]) {
      const row = lanes.filter((l) => l.rank === rank && (l.kind === kind || (kind === "communication" && l.kind === "wait")));
      if (!row.length) continue;
      row.forEach((lane) => (lane.y = depth + HEIGHT[kind] / 2));
      depth += HEIGHT[kind] + GAP;
    }
    bands[rank] = [top - BETWEEN_RANKS / 2, depth - GAP + BETWEEN_RANKS / 2];
    depth += BETWEEN_RANKS;
  }
  depth -= BETWEEN_RANKS;
  lanes.sort((a, b) => KINDS.indexOf(a.kind) - KINDS.indexOf(b.kind)); // what comes later is drawn on top
  const whole = [toMs(0), toMs(2 ** 32 - 1)];
  const clamp = ([a, b]) => {
    const width = Math.min(Math.max(b - a, 1e-4), whole[1] - whole[0]);
    const from = Math.min(Math.max(a, whole[0]), whole[1] - width);
    return [from, from + width];
  };

  const firstAfter = (sorted, tick) => {
    let low = 0, high = sorted.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] > tick) high = middle; else low = middle + 1;
    }
    return low;
  };

  const under = (lane, tick, slack) => { // the latest span that holds the instant, within a pixel and a half
    for (let i = firstAfter(lane.start, tick + slack) - 1; i >= 0 && lane.reach[i] >= tick - slack; i--)
      if (lane.end[i] >= tick - slack) return i;
    return -1;
  };

  function segments(lane, from, to, pixels, put) {
    const perTick = pixels / (to - from);
    let start = -1, end = -1, only = -1;
    const flush = () => start >= 0 && put(start, Math.max(end, start + 0.6 / perTick), only);
    for (let i = firstAfter(lane.reach, from); i < lane.start.length && lane.start[i] < to; i++) {
      if (lane.end[i] < from) continue;
      const joins = start >= 0 && (lane.start[i] - end) * perTick < 0.5 && ((end - start) * perTick < 3 || (lane.end[i] - lane.start[i]) * perTick < 3);
      if (joins) { end = Math.max(end, lane.end[i]); only = -1; continue; }
      flush();
      start = lane.start[i]; end = lane.end[i]; only = i;
    }
    flush();
  }

  const waited = (lane, start) => {
    if (lane.kind !== "communication") return start;
    const waits = lanes.find((other) => other.rank === lane.rank && other.kind === "wait");
    const i = waits ? under(waits, start, 0) : -1;
    return i >= 0 ? waits.end[i] : start;
  };

  const shown = { x: whole, y: [-BETWEEN_RANKS / 2, depth + BETWEEN_RANKS / 2] };

  function draw(ctx, { wide, high, px, py }) {
    const [from, to] = shown.x.map(toTick);
    const perTick = wide / (to - from);
    const left = (tick) => (Math.max(tick, from) - from) * perTick;
    const labels = [];
    let bars = 0;
    for (const { x0, x1, top, tall } of markPlaces(px, py)) {
      ctx.globalAlpha = 0.14;
      ctx.fillStyle = css("--mark");
      ctx.fillRect(x0, top, x1 - x0, tall);
      ctx.globalAlpha = 1;
    }
    for (const lane of lanes) {
      const tall = HEIGHT[lane.kind], top = py(lane.y) - tall / 2;
      ctx.fillStyle = css(COLOUR[lane.kind]);
      segments(lane, from, to, wide, (start, end, only) => {
        const right = (Math.min(end, to) - from) * perTick;
        const air = right - left(start) > 3 ? 0.5 : 0; // half a pixel between neighbours
        ctx.fillRect(left(start), top, right - left(start) - air, tall);
        bars += 1;
        const place = left(waited(lane, start)) + 4; // a label stands beside the wait, not on it
        const room = Math.floor((right - place - 4) / 5.6);
        if (only >= 0 && room >= 6 && lane.kind in INK)
          labels.push({ text: data.labels[lane.label[only]], room, place, y: top + tall / 2, colour: INK[lane.kind] });
      });
    }
    ctx.font = ctx.font.replace("12px", "10px");
    ctx.textBaseline = "middle";
    for (const { text, room, place, y, colour } of labels) {
      ctx.fillStyle = css(colour);
      ctx.fillText(text.length > room ? text.slice(0, room - 1) + "…" : text, place, y + 0.5);
    }
    ctx.lineWidth = 1;
    ctx.strokeStyle = css("--soft");
    ctx.setLineDash([1, 3]);
    for (const step of data.steps) {
      ctx.beginPath();
      ctx.moveTo(px(step.start / 1000), 0);
      ctx.lineTo(px(step.start / 1000), high);
      ctx.stroke();
    }
    ctx.setLineDash([]);
    ctx.lineWidth = 1.5;
    ctx.strokeStyle = css("--mark");
    for (const { x0, x1, top, tall } of markPlaces(px, py)) ctx.strokeRect(x0, top, x1 - x0, tall);
    Object.assign(box.dataset, { from: shown.x[0], to: shown.x[1], bars, labels: labels.length });
  }

  const markPlaces = (px, py) => data.marks.map(({ number, rank, start, end }) => {
    const [top, bottom] = (bands[rank] || shown.y).map(py);
    return { number, x0: px(start / 1000), x1: px(end / 1000), top, tall: bottom - top };
  });

  function names(ctx, { wide, px, py }) { // of steps and marks: they may stand over the edge
    ctx.font = ctx.font.replace("12px", "11px");
    let free = 0; // where the last name ends: names must not run into each other
    ctx.fillStyle = css("--soft");
    for (const step of data.steps) {
      const x = px(step.start / 1000);
      if (x < free || x > wide - 10) continue;
      ctx.fillText(step.name, x, -6);
      free = x + ctx.measureText(step.name).width + 12;
    }
    ctx.font = "bold " + ctx.font;
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    for (const { number, x0, top } of markPlaces(px, py)) {
      if (x0 < 0 || x0 > wide) continue;
      const half = ctx.measureText(number).width / 2 + 4;
      ctx.fillStyle = css("--ink");
      ctx.fillRect(x0 - half, top - 8, 2 * half, 16);
      ctx.fillStyle = css("--paper");
      ctx.fillText(number, x0, top + 0.5);
    }
  }

  function tip(left, down, wide) {
    const perPixel = (toTick(shown.x[1]) - toTick(shown.x[0])) / wide;
    const tick = toTick(shown.x[0]) + left * perPixel;
    const y = down - BETWEEN_RANKS / 2;
    const hit = lanes.map((lane) => [lane, Math.abs(lane.y - y) <= HEIGHT[lane.kind] / 2 + 1 ? under(lane, tick, 1.5 * perPixel) : -1])
      .filter(([, i]) => i >= 0).pop();
    if (!hit) return null;
    const [lane, i] = hit;
    const took = (lane.end[i] - lane.start[i]) * data.tick;
    const long = took >= 1000 ? (took / 1000).toFixed(3) + " ms" : took.toFixed(1) + " µs";
    return [data.labels[lane.label[i]], `rank ${lane.rank} · ${lane.name} · ${long} from ${toMs(lane.start[i]).toFixed(3)} ms`];
  }

  const redraw = chart(box, {
    x: { label: "ms since the first step began" },
    y: { label: "", size: 58, down: true, grid: false, ticks: data.ranks.map((rank) => [(bands[rank][0] + bands[rank][1]) / 2, "rank " + rank]) },
    shown, height: depth + BETWEEN_RANKS + ABOVE + BELOW, top: ABOVE, draw, above: names, tip,
    zoomed: (ranges) => show(ranges ? ranges.x : whole),
  });
  const show = (wanted) => { shown.x = clamp(wanted); redraw(); };

  const moves = {
    in: (a, w) => [a + w / 4, a + (3 * w) / 4], out: (a, w) => [a - w / 2, a + 1.5 * w],
    left: (a, w) => [a - w / 2, a + w / 2], right: (a, w) => [a + w / 2, a + 1.5 * w], all: () => whole,
  };
  const move = (name) => show(moves[name](shown.x[0], shown.x[1] - shown.x[0]));
  for (const button of document.querySelectorAll("[data-move]")) button.addEventListener("click", () => move(button.dataset.move));
  const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all" };
  box.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    move(keys[event.key]);
  });
  for (const button of document.querySelectorAll(".show"))
    button.addEventListener("click", () => {
      const [a, b] = [Number(button.dataset.start) / 1000, Number(button.dataset.end) / 1000];
      const air = Math.max((b - a) / 2, 0.05);
      show([a - air, b + air]);
      document.getElementById("timeline-title").scrollIntoView();
    });
})();
