// Draws the figures that the page carries (rendering/figures.py says what is in them). Nothing is computed here.

(function figures() {
  const NEAR = 14; // pixels between the pointer and what it means
  const number = (value) => value.toLocaleString("en", { maximumFractionDigits: 2 });

  function line(ctx, points, colour, dash, width) {
    ctx.strokeStyle = css(colour);
    ctx.lineWidth = width;
    ctx.setLineDash(dash);
    ctx.beginPath();
    points.forEach(([x, y]) => ctx.lineTo(x, y));
    ctx.stroke();
    ctx.setLineDash([]);
  }

  const SYMBOLS = {
    circle: (ctx, x, y) => { ctx.arc(x, y, 3.5, 0, 2 * Math.PI); ctx.fill(); },
    cross: (ctx, x, y) => { ctx.moveTo(x - 3.5, y - 3.5); ctx.lineTo(x + 3.5, y + 3.5); ctx.moveTo(x - 3.5, y + 3.5); ctx.lineTo(x + 3.5, y - 3.5); ctx.stroke(); },
    triangle: (ctx, x, y) => { ctx.moveTo(x - 4, y - 4); ctx.lineTo(x + 4, y - 4); ctx.lineTo(x, y + 4); ctx.fill(); },
  };

  // Each draws marks and tells `place` where they are: a rectangle in pixels, and the two lines to say about it.
  const KINDS = {
    band: (ctx, { px, py }, { x, y, ends }, { colour }) => {
      ctx.fillStyle = css(colour);
      ctx.globalAlpha = 0.2;
      ctx.beginPath();
      x.forEach((value, i) => ctx.lineTo(px(value), py(y[i])));
      x.map((value, i) => [px(value), py(ends[i])]).reverse().forEach(([left, top]) => ctx.lineTo(left, top));
      ctx.fill();
      ctx.globalAlpha = 1;
    },
    line: (ctx, { px, py }, { x, y }, { colour, dash }) => line(ctx, x.map((value, i) => [px(value), py(y[i])]), colour, dash, 2),
    points: (ctx, { px, py }, { x, y, symbols, texts }, { name, colour }, place) => {
      ctx.fillStyle = ctx.strokeStyle = css(colour);
      ctx.lineWidth = 2;
      x.forEach((value, i) => {
        const [left, top] = [px(value), py(y[i])];
        ctx.beginPath();
        SYMBOLS[symbols[i] || "circle"](ctx, left, top);
        place([left, top, left, top], [name, texts[i]]);
      });
    },
    bars: (ctx, { px, py, unit }, { x, y, ends, texts }, { name, colour }, place) => {
      ctx.fillStyle = css(colour);
      x.forEach((start, i) => {
        const [left, top, right, bottom] = [px(start), py(y[i] - 0.42), px(ends[i]), py(y[i] + 0.42)];
        const air = right - left > 3 ? 0.5 : 0; // half a pixel between neighbours
        ctx.fillRect(left, top, right - left - air, bottom - top);
        place([left, top, right, bottom], [name, `${texts[i]}: ${number(ends[i] - start)} ${unit} from ${number(start)}`]);
      });
    },
  };

  for (const [id, { looks, panels, height, shared }] of Object.entries(carried())) {
    const boxes = document.querySelectorAll(`#${id} .plot`);
    const keys = [...document.querySelectorAll(`[data-figure="${id}"]`)];
    const seen = ({ look }) => !keys.length || keys[look].getAttribute("aria-pressed") === "true";
    const whole = panels.map(({ x, y }) => ({ x: [x.low, x.high], y: [y.low, y.high] }));
    const shown = whole.map((ranges) => ({ ...ranges }));
    const redraws = panels.map((panel, i) => {
      let places = [];
      return chart(boxes[i], {
        x: panel.x, y: panel.y, shown: shown[i], height, zooms: "xy",
        draw: (ctx, area) => {
          places = [];
          if (panel.y.low < 0 && !panel.y.ticks.length) line(ctx, [[0, area.py(0)], [area.wide, area.py(0)]], "--soft", [], 1);
          for (const marks of panel.marks.filter(seen))
            KINDS[marks.kind](ctx, { ...area, unit: panel.x.label }, marks, looks[marks.look], (at, says) => places.push({ at, says }));
        },
        zoomed: (ranges) => {
          shown.forEach((each, j) => { if (shared || i === j) Object.assign(each, ranges || whole[j]); });
          redraws.forEach((redraw) => redraw());
        },
        tip: (x, y) => {
          let found = null, nearest = NEAR;
          for (const { at: [left, top, right, bottom], says } of places) {
            const away = Math.hypot(Math.max(left - x, 0, x - right), Math.max(top - y, 0, y - bottom));
            if (away < nearest) [nearest, found] = [away, says];
          }
          return found;
        },
      });
    });
    for (const key of keys)
      key.addEventListener("click", () => {
        key.setAttribute("aria-pressed", String(key.getAttribute("aria-pressed") !== "true"));
        redraws.forEach((redraw) => redraw());
      });
  }
})();
