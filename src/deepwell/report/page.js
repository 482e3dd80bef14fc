"use strict";
// What every page's script starts from: elements, numbers, the charts' colours and frames, copying.
const PAGE = (() => {
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const $ = (id) => document.getElementById(id);
  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "class") node.className = value;
      else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else node.setAttribute(key, value);
    }
    node.append(...children);
    return node;
  };
  const escape = (text) => String(text).replace(/[&<>"']/g, (c) => "&#" + c.charCodeAt(0) + ";");
  const percent = (x, digits = 1) => (100 * x).toFixed(digits) + "%";
  const number = (x) => Math.round(x).toLocaleString("en");
  const COLOURS = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d", "#ff9da6", "#79706e", "#86bcb6", "#d37295", "#a0cbe8"];
  const charts = [];
  const draw = (parent, height, option) => {
    const box = make("div", { class: "chart" });
    if (height) box.style.height = height + "px";
    parent.append(box);
    const chart = echarts.init(box, null, { renderer: "canvas" });
    const text = { color: css("--ink") };
    chart.setOption({ textStyle: text, animation: false, ...option });
    charts.push(chart);
    return chart;
  };
  const clear = () => { for (const chart of charts.splice(0)) chart.dispose(); };
  const axis = (extra) => ({
    axisLabel: { color: css("--soft") }, nameTextStyle: { color: css("--soft") },
    axisLine: { lineStyle: { color: css("--line") } }, splitLine: { lineStyle: { color: css("--line") } }, ...extra,
  });
  const tooltip = (extra) => ({
    backgroundColor: css("--surface"), borderColor: css("--line"), textStyle: { color: css("--ink"), fontSize: 12 }, confine: true, ...extra,
  });
  const legend = (extra) => ({ type: "scroll", textStyle: { color: css("--ink") }, pageTextStyle: { color: css("--ink") }, top: 0, ...extra });
  const isNarrow = () => window.innerWidth < 620;
  const FORMATS = { bf16: "#9aa4b0", fp32: "#79706e", fp16: "#9d755d", fp8: "#f0b35a", mxfp8: "#f58518", nvfp4: "#e45756", mxfp4: "#d37295", mxfp6: "#eeca3b" };

  // ---- copying ----
  // `of` gives the data of a panel by its name; every button.copy on the page is bound.
  const copy = async (button, of) => {
    const text = JSON.stringify(of(button.dataset.panel), null, 1);
    const before = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
    } catch (error) {
      // Pages opened from a file have no clipboard in some browsers: the old way works there.
      const area = make("textarea", {}, text);
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = before; }, 1200);
  };
  const copying = (of) => { for (const button of document.querySelectorAll("button.copy")) button.addEventListener("click", () => copy(button, of)); };

  let waiting;
  window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => charts.forEach((chart) => chart.resize()), 120); });
  return { css, $, make, escape, percent, number, COLOURS, FORMATS, charts, draw, clear, axis, tooltip, legend, isNarrow, copying };
})();
