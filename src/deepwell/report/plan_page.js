// Draws the panels from DATA. No network, no storage; the filters' state lives in the address, so it can be shared.
(() => {
  const { css, $, make, percent, number, COLOURS, FORMATS, draw, axis, tooltip, legend, isNarrow } = PAGE;

  // ---- ranked plans ----
  const KINDS = { plan: "the plan", fits: "fits, slower", slower: "slower at best", memory: "does not fit", rule: "not possible" };
  const FIRST = 20; // rows before the button that shows the rest
  const state = { q: "", tp: "", schedule: "", kinds: new Set(Object.keys(KINDS)), all: false };
  const readState = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    state.q = given.get("q") || "";
    state.tp = given.get("tp") || "";
    state.schedule = given.get("schedule") || "";
    if (given.has("kinds")) state.kinds = new Set(given.get("kinds").split(",").filter((k) => k in KINDS));
  };
  const writeState = () => {
    const out = new URLSearchParams();
    for (const key of ["q", "tp", "schedule"]) if (state[key]) out.set(key, state[key]);
    if (state.kinds.size !== Object.keys(KINDS).length) out.set("kinds", [...state.kinds].join(","));
    try { history.replaceState(null, "", "#" + out.toString()); } catch (error) { /* a page inside a frame may not */ }
  };
  const shown = () => {
    const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
    return DATA.plans.filter((row) => {
      if (!state.kinds.has(row.kind)) return false;
      if (state.tp && String(row.tp) !== state.tp) return false;
      if (state.schedule && row.schedule !== state.schedule) return false;
      const text = (row.layout + " " + (row.schedule || "") + " " + row.why).toLowerCase();
      return words.every((word) => text.includes(word));
    });
  };
  const COLUMNS = [
    ["", "n", (r) => r.rank || ""], ["layout", "l", (r) => r.layout], ["", "k", (r) => KINDS[r.kind]], ["schedule", "s", (r) => r.schedule || ""],
    ["step s", "n", (r) => (r.step_s ? r.step_s.toFixed(3) : "")], ["tok/s/GPU", "n", (r) => (r.tokens ? number(r.tokens) : "")],
    ["MFU", "n", (r) => (r.mfu ? percent(r.mfu) : "")], ["GiB", "n", (r) => (r.gib ? r.gib.toFixed(1) : "")],
    ["bubble", "n", (r) => (r.bubble === undefined ? "" : percent(r.bubble))], ["exposed", "n", (r) => (r.exposed === undefined ? "" : percent(r.exposed))],
    ["why not", "l", (r) => r.why],
  ];
  let pareto;
  const fillPlans = () => {
    const rows = shown();
    const drawn = state.all ? rows : rows.slice(0, FIRST);
    const body = $("plan-rows");
    body.replaceChildren(...drawn.map((row) => {
      // What was never priced has no numbers: its reason takes their place.
      const cells = row.step_s ? COLUMNS : COLUMNS.slice(0, 3);
      const line = make("tr", { class: row.kind }, ...cells.map(([name, style, of]) => make("td", { class: style, "data-head": name }, String(of(row)))));
      if (!row.step_s) line.append(make("td", { colspan: String(COLUMNS.length - 3) }, row.why));
      return line;
    }));
    $("plan-count").textContent = rows.length + " of " + DATA.plans.length;
    $("plan-more").hidden = rows.length <= FIRST;
    $("plan-more").textContent = state.all ? "show the first " + FIRST : "show all " + rows.length;
    const points = rows.filter((row) => row.gib);
    pareto.setOption({ series: [{ id: "points", data: points.map((row) => ({ value: [row.gib, row.tokens], row, itemStyle: { color: row.kind === "plan" ? css("--accent") : COLOURS[9] }, symbolSize: row.kind === "plan" ? 16 : 11 })) }] });
  };
  const plansPanel = () => {
    const host = $("plans");
    const distinct = (key) => [...new Set(DATA.plans.map((row) => row[key]).filter((x) => x !== undefined))];
    const select = (id, label, key) => {
      const box = make("select", { id, "aria-label": label, onchange: (event) => { state[key] = event.target.value; writeState(); fillPlans(); } }, make("option", { value: "" }, label + ": all"), ...distinct(key).map((value) => make("option", { value: String(value) }, label + " " + value)));
      box.value = state[key];
      return box;
    };
    const search = make("input", { type: "search", id: "filter-text", placeholder: "filter: TP4, bubble, KV heads ...", "aria-label": "filter", oninput: (event) => { state.q = event.target.value; writeState(); fillPlans(); } });
    search.value = state.q;
    const boxes = Object.entries(KINDS).filter(([kind]) => DATA.plans.some((row) => row.kind === kind)).map(([kind, word]) => {
      const box = make("input", { type: "checkbox", id: "kind-" + kind, onchange: (event) => { if (event.target.checked) state.kinds.add(kind); else state.kinds.delete(kind); writeState(); fillPlans(); } });
      box.checked = state.kinds.has(kind);
      return make("label", {}, box, word);
    });
    pareto = draw(host, 260, {
      grid: { left: 64, right: 24, top: 24, bottom: 44 },
      tooltip: tooltip({ trigger: "item", formatter: (p) => "<b>" + p.data.row.layout + "</b><br>" + number(p.value[1]) + " tokens/s/GPU, " + p.value[0].toFixed(1) + " GiB<br>" + p.data.row.why }),
      xAxis: axis({ type: "value", name: "peak GiB", nameLocation: "middle", nameGap: 28, scale: true }),
      yAxis: axis({ type: "value", name: "tokens/s/GPU", scale: true }),
      series: [{ id: "points", type: "scatter", data: [] }],
    });
    host.append(make("div", { class: "filters" }, search, select("filter-tp", "TP", "tp"), select("filter-schedule", "schedule", "schedule"), ...boxes, make("span", { class: "count", id: "plan-count" })));
    host.append(make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...COLUMNS.map(([name, style]) => make("th", { class: style === "n" ? "n" : "" }, name)))), make("tbody", { id: "plan-rows" }))));
    host.append(make("button", { type: "button", id: "plan-more", onclick: () => { state.all = !state.all; fillPlans(); } }));
    fillPlans();
  };

  // ---- memory ----
  const memoryPanel = () => {
    const m = DATA.memory;
    const lines = [];
    const words = [];
    const line = (at, name, colour, type) => {
      lines.push({ xAxis: at, label: { show: false }, lineStyle: { color: colour, type, width: 2 } });
      words.push(name + " " + at.toFixed(1) + " GiB (" + (type === "solid" ? "red line" : "dashed line") + ")");
    };
    if (m.hbm_gib) line(m.hbm_gib, "HBM", css("--bad"), "solid");
    if (m.limit_gib && Math.abs(m.limit_gib - (m.hbm_gib || 0)) > 0.05) line(m.limit_gib, "allowed", css("--warn"), "dashed");
    $("memory").append(make("p", { class: "what" }, "Fullest rank " + m.peak_gib.toFixed(1) + " GiB; " + words.join(", ") + "."));
    const names = Object.keys(m.parts);
    draw($("memory"), Math.max(240, 130 + 26 * m.ranks.length), {
      color: COLOURS, legend: legend(), grid: { left: 60, right: 40, top: 56, bottom: 44 },
      tooltip: tooltip({ trigger: "axis", axisPointer: { type: "shadow" }, valueFormatter: (x) => x.toFixed(2) + " GiB" }),
      xAxis: axis({ type: "value", name: "GiB", nameLocation: "middle", nameGap: 28, max: Math.ceil((Math.max(m.hbm_gib || 0, m.peak_gib) * 1.04) / 20) * 20 }),
      yAxis: axis({ type: "category", data: m.ranks.map((r) => "rank " + r), inverse: true }),
      series: names.map((name, i) => ({ name, type: "bar", stack: "all", barMaxWidth: 26, data: m.parts[name], markLine: i === 0 && lines.length ? { symbol: "none", data: lines, silent: true } : undefined })),
    });
  };

  // ---- pipeline ----
  const ACTIONS = { F: ["forward", "#4c78a8"], B: ["backward", "#f58518"], I: ["backward of inputs", "#e9a04b"], W: ["backward of weights", "#54a24b"] };
  const pipelinePanel = () => {
    const p = DATA.pipeline;
    const host = $("pipeline");
    const cut = p.skipped_ms ? ", " + number(p.skipped_ms) + " ms of steady state left out of the drawing" : "";
    host.append(make("p", { class: "what" }, p.schedule + ", " + p.ranks + " ranks, " + p.stages + " stages, " + p.microbatches + " micro-batches: " + number(p.makespan_ms) + " ms, " + percent(p.bubble) + " of all ranks' time idle (uneven stages included), in flight " + Math.max(...p.in_flight).toFixed(1) + " micro-batches at most" + cut + "."));
    const used = [...new Set(p.events.map((e) => e[1]))];
    const end = Math.max(...p.events.map((e) => e[5]));
    const span = Math.min(100, Math.max(3, 100 * (isNarrow() ? 60 : 160) * p.ranks / p.events.length));
    const byKind = (kind) => p.events.filter((e) => e[1] === kind).map((e) => ({ value: [e[4], e[0], e[5] - e[4], e[2], e[3]] }));
    draw(host, Math.max(220, 120 + 22 * p.ranks), {
      legend: legend({ data: used.map((k) => ACTIONS[k][0]) }), grid: { left: 60, right: 34, top: 40, bottom: 70 },
      tooltip: tooltip({ formatter: (q) => "rank " + q.value[1] + ", " + q.seriesName + " of micro-batch " + q.value[4] + ", stage " + q.value[3] + "<br>" + q.value[2].toFixed(2) + " ms from " + q.value[0].toFixed(2) + " ms" }),
      dataZoom: [{ type: "slider", xAxisIndex: 0, start: 0, end: span, bottom: 8, height: 20, textStyle: { color: css("--soft") } }, { type: "inside", xAxisIndex: 0, zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false }],
      xAxis: axis({ type: "value", min: 0, max: end, axisLabel: { color: css("--soft"), formatter: (x) => number(x) + " ms", hideOverlap: true, showMaxLabel: false }, splitLine: { show: false } }),
      yAxis: axis({ type: "category", data: [...Array(p.ranks).keys()].map((r) => "rank " + r), inverse: true }),
      series: used.map((kind) => ({
        name: ACTIONS[kind][0], type: "custom", itemStyle: { color: ACTIONS[kind][1] }, encode: { x: [0], y: 1 }, data: byKind(kind),
        renderItem: (params, api) => {
          const from = api.coord([api.value(0), api.value(1)]);
          const to = api.coord([api.value(0) + api.value(2), api.value(1)]);
          const height = api.size([0, 1])[1] * 0.78;
          const shape = echarts.graphic.clipRectByRect({ x: from[0], y: from[1] - height / 2, width: Math.max(1, to[0] - from[0] - 0.6), height }, { x: params.coordSys.x, y: params.coordSys.y, width: params.coordSys.width, height: params.coordSys.height });
          if (!shape) return null;
          const wide = shape.width > 22;
          return { type: "rect", shape, style: { fill: api.visual("color"), opacity: api.value(3) >= p.ranks ? 0.72 : 1 }, textContent: wide ? { type: "text", style: { text: String(api.value(4)), fill: "#fff", fontSize: 10 } } : undefined, textConfig: { position: "inside" } };
        },
      })),
    });
  };

  // ---- time ----
  const GROUPS = { computation: "#4c78a8", "exposed communication": "#e45756", waiting: "#9aa4b0", overhead: "#eeca3b" };
  const timePanel = () => {
    const t = DATA.time;
    const parts = [...t.parts].sort((a, b) => b.seconds - a.seconds);
    draw($("time"), 90 + 26 * parts.length, {
      legend: legend({ data: Object.keys(GROUPS) }), grid: { left: isNarrow() ? 110 : 300, right: 70, top: 34, bottom: 30 },
      tooltip: tooltip({ formatter: (q) => q.data.part.what + " (" + q.data.part.name + ")<br>" + (1000 * q.data.part.seconds).toFixed(1) + " ms, " + percent(q.data.part.seconds / t.step_s) + " of the step" }),
      xAxis: axis({ type: "value", axisLabel: { color: css("--soft"), formatter: (x) => number(1000 * x) + " ms", hideOverlap: true } }),
      yAxis: axis({ type: "category", inverse: true, data: parts.map((q) => (isNarrow() ? q.name : q.what)) }),
      series: Object.entries(GROUPS).map(([group, colour]) => ({
        name: group, type: "bar", stack: "one", barMaxWidth: 18, itemStyle: { color: colour },
        label: { show: true, position: "right", color: css("--soft"), formatter: (q) => (q.data.part ? percent(q.data.part.seconds / t.step_s) : "") },
        data: parts.map((part) => (part.group === group ? { value: part.seconds, part } : { value: 0, part, label: { show: false } })),
      })),
    });
  };

  // ---- topology ----
  const AXES = { tp: "#4c78a8", cp: "#54a24b", dp: "#f58518", pp: "#b279a2", ep: "#e45756" };
  const AXIS_WORDS = { tp: "tensor parallel", cp: "context parallel", dp: "data parallel", pp: "pipeline", ep: "expert parallel" };
  const topologyPanel = () => {
    const t = DATA.topology;
    const host = $("topology");
    const place = (rank) => ({ tp: rank % t.degrees.tp, cp: Math.floor(rank / t.degrees.tp) % t.degrees.cp, dp: Math.floor(rank / (t.degrees.tp * t.degrees.cp)) % t.degrees.dp, pp: Math.floor(rank / (t.degrees.tp * t.degrees.cp * t.degrees.dp)), ep: rank % Math.max(1, t.degrees.ep) });
    let chosen = (t.axes.find((a) => a.size > 1) || t.axes[0]).name;
    const gpus = [];
    const paint = () => {
      const size = Math.max(1, t.degrees[chosen]);
      for (const [rank, node] of gpus) {
        const at = place(rank)[chosen];
        const share = Math.round(25 + 75 * (size > 1 ? at / (size - 1) : 1));
        node.style.background = "color-mix(in srgb, " + AXES[chosen] + " " + share + "%, " + css("--surface") + ")";
        node.style.color = share > 60 ? "#fff" : css("--ink");
        node.textContent = String(at);
      }
      for (const button of host.querySelectorAll(".axis")) button.setAttribute("aria-pressed", String(button.dataset.axis === chosen));
    };
    host.append(make("div", { class: "axes" }, ...t.axes.map((a) => {
      const where = a.size === 1 ? "not used" : (a.inside_nvlink ? "inside NVLink" : "crosses the network") + (a.gb_per_s ? ", " + a.gb_per_s.toFixed(0) + " GB/s per GPU" : "");
      const cost = a.exposed_s > 0 ? ", " + (1000 * a.exposed_s).toFixed(0) + " ms exposed" : "";
      const button = make("button", { type: "button", class: "axis", "data-axis": a.name, onclick: () => { chosen = a.name; paint(); } }, make("b", {}, a.name.toUpperCase() + " " + a.size), " " + AXIS_WORDS[a.name], make("br"), where + cost);
      button.style.borderLeftColor = AXES[a.name];
      return button;
    })));
    const domains = make("div", { class: "domains" });
    const drawn = isNarrow() ? Math.min(t.drawn, Math.max(t.nvlink_domain, 48)) : t.drawn;
    for (let first = 0; first < drawn; first += t.nvlink_domain) {
      const last = Math.min(first + t.nvlink_domain, drawn);
      const box = make("div", { class: "gpus" });
      box.style.gridTemplateColumns = "repeat(" + Math.min(isNarrow() ? 8 : 12, last - first) + ", 26px)";
      for (let rank = first; rank < last; rank++) {
        const at = place(rank);
        const node = make("div", { class: "gpu", title: "GPU " + rank + ": TP " + at.tp + ", CP " + at.cp + ", DP " + at.dp + ", PP " + at.pp });
        gpus.push([rank, node]);
        box.append(node);
      }
      domains.append(make("div", { class: "domain" }, make("div", { class: "name" }, (t.nvlink_domain > 1 ? "NVLink domain: GPUs " : "GPU ") + first + (last - first > 1 ? " to " + (last - 1) : "")), box));
    }
    const rest = t.gpus - drawn;
    host.append(domains, make("p", { class: "legend" }, "Each square is a GPU; the number is its place on the chosen axis. " + t.num_nodes + " nodes of " + t.gpus_per_node + (t.nvlink_gb_per_s ? ", NVLink " + t.nvlink_gb_per_s + " GB/s" : "") + (t.nic_gb_per_s ? ", network " + t.nic_gb_per_s + " GB/s" : "") + " per GPU and direction." + (rest > 0 ? " " + number(rest) + " more GPUs repeat the pattern." : "")));
    paint();
  };

  // ---- precision ----
  const precisionPanel = () => {
    const p = DATA.precision;
    const host = $("precision");
    const chip = (format) => {
      const node = make("span", { class: "chip" }, format);
      node.style.background = FORMATS[format.split(" ")[0]] || css("--chip");
      node.style.color = "#16202c";
      return node;
    };
    host.append(make("p", { class: "what" }, "Share of the linear layers' flops: " + p.shares.map(([format, share]) => format + " " + percent(share)).join(", ") + "."));
    const rows = [];
    for (const group of p.groups) {
      group.rows.forEach((row, i) => rows.push(make("tr", {}, make("td", {}, i === 0 ? group.where : ""), make("td", { class: "l" }, row.op), ...["fwd", "dgrad", "wgrad"].map((gemm) => make("td", {}, chip(row[gemm]))), make("td", {}, row.decided_by.join("; ")))));
    }
    host.append(make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...["where", "layer", "fwd", "dgrad", "wgrad", "decided by"].map((h) => make("th", {}, h)))), make("tbody", {}, ...rows))));
    for (const note of p.notes) host.append(make("p", { class: "legend" }, note));
  };

  // ---- sensitivity ----
  const sensitivityPanel = () => {
    const s = DATA.sensitivity;
    const host = $("sensitivity");
    const timed = s.changes.filter((c) => c.slower !== undefined && c.slower !== null);
    draw(host, 70 + 24 * timed.length, {
      grid: { left: isNarrow() ? 150 : 260, right: 70, top: 10, bottom: 30 },
      tooltip: tooltip({ formatter: (q) => q.data.change.what + "<br>step " + (q.data.change.slower >= 0 ? "+" : "") + percent(q.data.change.slower) + ", " + q.data.change.peak_gib.toFixed(1) + " GiB" + (q.data.change.note ? "<br>" + q.data.change.note : "") }),
      xAxis: axis({ type: "value", axisLabel: { color: css("--soft"), formatter: (x) => Math.round(100 * x) + "%", hideOverlap: true } }),
      yAxis: axis({ type: "category", inverse: true, data: timed.map((c) => c.what), axisLabel: { color: css("--ink"), width: isNarrow() ? 140 : 250, overflow: "truncate" } }),
      series: [{ type: "bar", barMaxWidth: 16, data: timed.map((c) => ({ value: c.slower, change: c, itemStyle: { color: !c.fits ? css("--line") : c.slower > 0 ? "#e45756" : "#54a24b", borderColor: c.fits ? undefined : css("--bad"), borderType: "dashed", borderWidth: c.fits ? 0 : 1 }, label: { show: true, position: c.slower >= 0 ? "right" : "left", color: css("--soft"), formatter: (c.slower >= 0 ? "+" : "") + percent(c.slower) } })) }],
    });
    const rows = s.changes.map((c) => make("tr", {}, make("td", { class: "l" }, c.what), make("td", { class: "n" }, c.slower === undefined || c.slower === null ? "" : (c.slower >= 0 ? "+" : "") + percent(c.slower)), make("td", { class: "n" }, c.peak_gib ? c.peak_gib.toFixed(1) : ""), make("td", {}, c.fits ? "fits" : "no"), make("td", { class: "l" }, c.note || "")));
    host.append(make("p", { class: "legend" }, "Dashed: does not fit."), make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...["change", "step", "GiB", "", ""].map((h, i) => make("th", { class: i === 1 || i === 2 ? "n" : "" }, h)))), make("tbody", {}, ...rows))));
  };

  const kernelsPanel = () => $("kernels").append(make("ul", { class: "kernels" }, ...DATA.kernels.map((line) => make("li", {}, line))));

  readState();
  plansPanel();
  memoryPanel();
  pipelinePanel();
  timePanel();
  topologyPanel();
  precisionPanel();
  sensitivityPanel();
  kernelsPanel();
  PAGE.copying((panel) => DATA[panel]);
  document.documentElement.dataset.ready = "yes";
})();
