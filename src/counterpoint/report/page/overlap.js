"use strict";
// Draws the figure that the page carries in the page's own colours, again when they change. Nothing is computed here.

(function overlap() {
  const box = document.getElementById("plot");
  if (!box || !window.Plotly) return;
  const { traces, layout } = JSON.parse(document.getElementById("data").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const draw = () => {
    const lines = { gridcolor: css("--line"), linecolor: css("--line"), zerolinecolor: css("--soft") };
    const themed = { ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--ink"), size: 12 } };
    for (const [key, value] of Object.entries(layout)) {
      if (/^[xy]axis/.test(key)) themed[key] = { ...value, ...lines };
    }
    Plotly.react(box, traces.map((trace) => ({ type: "scatter", ...trace })), themed, { responsive: true, displayModeBar: false });
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
