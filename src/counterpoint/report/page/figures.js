"use strict";
// Draws the figures that the page carries in the page's own colours, again when they change. Nothing is computed here.

(function figures() {
  if (!window.Plotly) return;
  const carried = JSON.parse(document.getElementById("data").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const coloured = (value) => (typeof value === "string" && value.startsWith("--") ? css(value) : value);
  const draw = () => {
    const lines = { gridcolor: css("--line"), linecolor: css("--line"), zerolinecolor: css("--soft") };
    for (const [id, { traces, layout }] of Object.entries(carried)) {
      const themed = { ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--ink"), size: 12 } };
      for (const [key, value] of Object.entries(layout)) {
        if (/^[xy]axis/.test(key)) themed[key] = { ...value, ...lines };
      }
      const inked = traces.map((trace) => ({
        type: "scatter",
        ...trace,
        ...(trace.marker ? { marker: { ...trace.marker, color: coloured(trace.marker.color) } } : {}),
        ...(trace.line ? { line: { ...trace.line, color: coloured(trace.line.color) } } : {}),
      }));
      Plotly.react(document.getElementById(id), inked, themed, { responsive: true, displayModeBar: false });
    }
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
