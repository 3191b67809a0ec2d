"use strict";
// The timeline draws at most a pixel's worth of detail: for each view, the spans of a lane that fall together on the
// screen become one segment, and a kind of lane is one trace. Text of a trace only ever becomes text, never markup.

(function sortableTables() {
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...table.tBodies[0].rows].map((row) => [value(row, column), row]);
        rows.sort(([a], [b]) => (a < b ? 1 : a > b ? -1 : 0) * (down ? 1 : -1));
        table.tBodies[0].append(...rows.map(([, row]) => row));
      });
    });
  }
})();

(function timeline() {
  const box = document.getElementById("timeline");
  if (!box || !window.Plotly) return;
  const data = JSON.parse(document.getElementById("data").textContent);
  const KINDS = ["compute", "communication", "wait", "memcpy", "host"];
  const HEIGHT = { compute: 13, communication: 13, wait: 13, memcpy: 6, host: 6 };
  const COLOUR = { compute: "--compute", communication: "--transfer", wait: "--wait", memcpy: "--memcpy", host: "--host" };
  const INK = { compute: "--on-compute", communication: "--on-transfer" };
  const GAP = 2, BETWEEN_RANKS = 11, MARGIN = { l: 58, r: 10, t: 26, b: 44 };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const ticks = (text) => {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    return new Uint32Array(bytes.buffer);
  };
  const toMs = (tick) => (data.origin + tick * data.tick) / 1000;

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

  function traces(range) {
    const pixels = Math.max(100, box.clientWidth - MARGIN.l - MARGIN.r);
    const tick = (ms) => (ms * 1000 - data.origin) / data.tick;
    const [from, to] = [tick(range[0]), tick(range[1])];
    const out = KINDS.map((kind) => ({
      type: "scatter", mode: "lines", x: [], y: [], hoverinfo: "skip", connectgaps: false,
      line: { color: css(COLOUR[kind]), width: HEIGHT[kind], simplify: false },
    }));
    const text = { type: "scatter", mode: "text", x: [], y: [], text: [], textposition: "middle right", hoverinfo: "skip", textfont: { size: 10, color: [] } };
    const edge = (0.5 * (to - from)) / pixels; // half a pixel of air between neighbours
    for (const lane of lanes) {
      const trace = out[KINDS.indexOf(lane.kind)];
      segments(lane, from, to, pixels, (start, end, only) => {
        const wide = end - start > 6 * edge;
        trace.x.push(toMs(Math.max(start, from)), toMs(Math.min(wide ? end - edge : end, to)), null);
        trace.y.push(lane.y, lane.y, null);
        const left = Math.max(from, waited(lane, start)); // a label stands beside the wait, not on it
        const room = Math.floor((((Math.min(end, to) - left) / (to - from)) * pixels - 8) / 5.6);
        if (only >= 0 && room >= 6 && lane.kind in INK && text.x.length < 400) {
          const label = data.labels[lane.label[only]];
          text.x.push(toMs(left));
          text.y.push(lane.y);
          text.text.push(plain(label.length > room ? label.slice(0, room - 1) + "…" : label));
          text.textfont.color.push(css(INK[lane.kind]));
        }
      });
    }
    return [...out, text];
  }

  // plotly reads a few tags in text; an escaped < is a plain character to it.
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function marks() {
    const shapes = [], annotations = [];
    const room = (96 / Math.max(100, box.clientWidth - MARGIN.l - MARGIN.r)) * (range[1] - range[0]);
    let named = -Infinity; // where the last name stands: names must not run into each other
    for (const step of data.steps) {
      const x = step.start / 1000;
      shapes.push({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: css("--soft"), width: 1, dash: "dot" } });
      if (x < range[0] || x - named < room) continue;
      named = x;
      annotations.push({ x, y: 1, yref: "paper", yanchor: "bottom", xanchor: "left", showarrow: false, text: plain(step.name), font: { size: 11, color: css("--soft") } });
    }
    for (const mark of data.marks) {
      const [top, bottom] = bands[mark.rank] || [-BETWEEN_RANKS / 2, depth + BETWEEN_RANKS / 2];
      const [x0, x1] = [mark.start / 1000, mark.end / 1000];
      shapes.push({ type: "rect", x0, x1, y0: top, y1: bottom, fillcolor: css("--mark"), opacity: 0.14, line: { width: 0 }, layer: "below" });
      shapes.push({ type: "rect", x0, x1, y0: top, y1: bottom, line: { width: 1.5, color: css("--mark") } });
      annotations.push({ x: x0, y: top, xanchor: "center", yanchor: "middle", showarrow: false, text: "<b>" + mark.number + "</b>", font: { size: 11, color: css("--paper") }, bgcolor: css("--ink"), borderpad: 2 });
    }
    return { shapes, annotations };
  }

  let range = whole.slice();
  const layout = () => ({
    height: depth + MARGIN.t + MARGIN.b + BETWEEN_RANKS, margin: { ...MARGIN, autoexpand: false }, showlegend: false, hovermode: false,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: css("--panel"), font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--soft") },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: { range: range.slice(), title: { text: "ms since the first step began", standoff: 8 }, zeroline: false, gridcolor: css("--line"), tickformat: ",~f", exponentformat: "none", automargin: false },
    yaxis: {
      range: [depth + BETWEEN_RANKS / 2, -BETWEEN_RANKS / 2], fixedrange: true, zeroline: false, showgrid: false, ticks: "outside", ticklen: 6, tickcolor: "rgba(0,0,0,0)", automargin: false,
      tickvals: data.ranks.map((rank) => (bands[rank][0] + bands[rank][1]) / 2), ticktext: data.ranks.map((rank) => "rank " + rank),
    },
    ...marks(),
  });
  const config = { displayModeBar: false, responsive: true, doubleClick: false, displaylogo: false };
  const draw = () => Plotly.react(box, traces(range), layout(), config);
  const show = (wanted) => { range = clamp(wanted); return draw(); };

  draw().then(() => {
    box.on("plotly_relayout", (change) => {
      const [a, b] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (Number.isFinite(a) && Number.isFinite(b)) show([a, b]);
      else if (change.autosize) draw();
    });
    box.on("plotly_doubleclick", () => show(whole));
    box.dataset.ready = "yes";
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  const moves = {
    in: (a, w) => [a + w / 4, a + (3 * w) / 4], out: (a, w) => [a - w / 2, a + 1.5 * w],
    left: (a, w) => [a - w / 2, a + w / 2], right: (a, w) => [a + w / 2, a + 1.5 * w], all: () => whole,
  };
  for (const button of document.querySelectorAll("[data-move]"))
    button.addEventListener("click", () => show(moves[button.dataset.move](range[0], range[1] - range[0])));
  for (const button of document.querySelectorAll(".show"))
    button.addEventListener("click", () => {
      const [a, b] = [Number(button.dataset.start) / 1000, Number(button.dataset.end) / 1000];
      const air = Math.max((b - a) / 2, 0.05);
      show([a - air, b + air]);
      document.getElementById("timeline-title").scrollIntoView();
    });

  const tip = document.getElementById("tip");
  const at = (event) => {
    const frame = box.getBoundingClientRect();
    const [px, py] = [event.clientX - frame.left, event.clientY - frame.top];
    const wide = frame.width - MARGIN.l - MARGIN.r;
    const ms = range[0] + ((px - MARGIN.l) / wide) * (range[1] - range[0]);
    const slack = (((range[1] - range[0]) * 1000) / wide / data.tick) * 1.5;
    return { px, py, y: py - MARGIN.t - BETWEEN_RANKS / 2, tick: (ms * 1000 - data.origin) / data.tick, slack, inside: px >= MARGIN.l && px <= frame.width - MARGIN.r };
  };
  box.addEventListener("pointermove", (event) => {
    const { px, py, y, tick, slack, inside } = at(event);
    const hit = inside && lanes.map((lane) => [lane, Math.abs(lane.y - y) <= HEIGHT[lane.kind] / 2 + 1 ? under(lane, tick, slack) : -1])
      .filter(([, i]) => i >= 0).pop();
    tip.hidden = !hit;
    if (!hit) return;
    const [lane, i] = hit;
    const bold = document.createElement("b");
    bold.textContent = data.labels[lane.label[i]];
    const took = (lane.end[i] - lane.start[i]) * data.tick;
    const rest = `rank ${lane.rank} · ${lane.name} · ${took >= 1000 ? (took / 1000).toFixed(3) + " ms" : took.toFixed(1) + " µs"} from ${toMs(lane.start[i]).toFixed(3)} ms`;
    tip.replaceChildren(bold, document.createElement("br"), rest);
    tip.style.left = Math.max(0, Math.min(px + 14, box.clientWidth - tip.offsetWidth - 4)) + "px";
    tip.style.top = py + 16 + "px";
  });
  box.addEventListener("pointerleave", () => { tip.hidden = true; });
})();
