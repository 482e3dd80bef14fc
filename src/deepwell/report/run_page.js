// Draws the panels of the chosen run from DATA. No network, no storage; what is chosen lives in the address.
(() => {
  const { css, $, make, escape, percent, number, FORMATS, draw, axis, tooltip, legend, isNarrow } = PAGE;
  const RUNS = DATA.runs;
  // Lines are thin: on a dark ground they need lighter colours than the bars of other pages.
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const LIGHTER = ["#7db3e8", "#ffa552", "#7fce83", "#cfa0d6", "#ff8a80", "#8fd3cd", "#f2d667", "#c7a48b", "#ffb3bb", "#aab2bb", "#a3d4cd", "#e79ab3", "#c3ddf2"];
  let COLOURS = PAGE.COLOURS;
  const state = { run: 0, x: "step", smooth: "", log: "", gemm: "all", changed: "" };
  const readState = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    for (const key of Object.keys(state)) if (given.has(key)) state[key] = given.get(key);
    state.run = Math.min(RUNS.length - 1, Math.max(0, parseInt(state.run, 10) || 0));
    if (!["step", "tokens", "seconds"].includes(state.x)) state.x = "step";
  };
  const set = (key, value) => {
    state[key] = value;
    const out = new URLSearchParams(Object.entries(state).filter(([, v]) => v !== "" && v !== 0 && v !== "step" && v !== "all"));
    try { history.replaceState(null, "", "#" + out.toString()); } catch (error) { /* a page inside a frame may not */ }
    paint();
  };

  // ---- words ----
  const known = (x) => x !== null && x !== undefined;
  const shown = (x, format, none = "–") => (known(x) ? format(x) : none);
  const short = (x) => { const [size, unit] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([s]) => Math.abs(x) >= s) || [1, ""]; return parseFloat((x / size).toPrecision(4)) + unit; };
  const digits = (n) => (x) => (known(x) ? String(parseFloat(x.toPrecision(n))) : "–");
  const duration = (s) => {
    if (s < 60) return parseFloat(s.toPrecision(s < 10 ? 3 : 2)) + " s";
    const [size, word, part, less] = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]].find(([n]) => s >= n);
    const whole = Math.floor(Math.round(s / part) / (size / part));
    const rest = Math.round(s / part) % (size / part);
    return whole + " " + word + (rest ? " " + rest + " " + less : "");
  };
  const bytes = (n) => (n >= 2 ** 30 ? (n / 2 ** 30).toFixed(1) + " GiB" : n >= 2 ** 20 ? (n / 2 ** 20).toFixed(1) + " MiB" : number(n) + " B");
  const when = (t) => new Date(1000 * t).toLocaleString("en-GB");
  const plural = (n, word) => number(n) + " " + word + (n === 1 ? "" : "s");

  // ---- pieces ----
  const table = (heads, rows) => make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads.map(([name, style]) => make("th", { class: style === "n" ? "n" : "" }, name)))), make("tbody", {}, ...rows)));
  const cell = (text, style = "") => make("td", { class: style }, text);
  const empty = (host, why) => host.append(make("p", { class: "empty" }, why));
  const segments = (label, choices, chosen, choose) => make("span", { class: "group" }, label, make("span", { class: "segments", role: "group", "aria-label": label }, ...choices.map(([value, word]) => make("button", { type: "button", "data-value": String(value), "aria-pressed": String(value === chosen), title: word, onclick: () => choose(value) }, word))));
  const tick = (id, label, on, choose) => {
    const box = make("input", { type: "checkbox", id, onchange: (event) => choose(event.target.checked ? "1" : "") });
    box.checked = Boolean(on);
    return make("label", {}, box, label);
  };
  const listed = (host, first, rows, build) => {
    // The first rows of a long table, and a button for the rest.
    const body = make("div");
    const fill = (all) => body.replaceChildren(build(all ? rows : rows.slice(0, first)), ...(rows.length > first ? [make("button", { type: "button", class: "more", onclick: () => fill(!all) }, all ? "show the first " + first : "show all " + number(rows.length))] : []));
    fill(false);
    host.append(body);
  };

  // ---- charts over the run ----
  const AXES = { step: ["step", (x) => number(x)], tokens: ["tokens", (x) => short(x)], seconds: ["hours", (x) => String(parseFloat(x.toPrecision(4)))] };
  const place = { step: 0, tokens: 1, seconds: 2 };
  const scaled = (x) => (state.x === "seconds" && known(x) ? x / 3600 : x);
  const points = (run, series) => (series ? series.i.map((at, k) => [scaled(run.x[state.x][at]), series.y[k]]) : []);
  const spot = (point) => scaled(point[place[state.x]]);
  let linked = [];
  let syncing = false;
  const follow = (chart) => {
    linked.push(chart);
    chart.on("datazoom", () => {
      if (syncing) return;
      syncing = true;
      const { start, end } = chart.getOption().dataZoom[0];
      for (const other of linked) if (other !== chart) other.dispatchAction({ type: "dataZoom", start, end });
      syncing = false;
    });
  };
  const line = (name, data, colour, extra = {}) => ({ name, type: "line", data, showSymbol: data.length < 3, symbolSize: 6, connectNulls: false, itemStyle: { color: colour }, lineStyle: { color: colour, width: 1.6 }, emphasis: { disabled: true }, ...extra });
  const keys = (series) => legend({ itemWidth: 14, itemHeight: 9, itemGap: 14, data: series.map((one) => ({ name: one.name, icon: one.type === "scatter" ? one.symbol : "roundRect" })) });
  const curves = (host, option) => {
    const [name, format] = AXES[state.x];
    const { slider, right, height, xMin = "dataMin", xMax = "dataMax", ...rest } = option;
    const zoom = [{ type: "inside", xAxisIndex: 0, filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, disabled: isNarrow() }];
    if (slider) zoom.unshift({ type: "slider", xAxisIndex: 0, filterMode: "none", bottom: 6, height: 18, borderColor: css("--line"), fillerColor: "rgba(110,150,200,.18)", showDataShadow: false, labelFormatter: "", brushSelect: false });
    const chart = draw(host, height, {
      grid: { left: 8, right: right ? 8 : 30, top: isNarrow() ? 58 : 48, bottom: slider ? 50 : 26, containLabel: true },
      legend: keys(option.series), dataZoom: zoom,
      tooltip: tooltip({ trigger: "axis", axisPointer: { label: { formatter: (p) => name + " " + format(p.value) } }, valueFormatter: digits(5) }),
      xAxis: axis({ type: "value", min: xMin, max: xMax, name, nameLocation: "middle", nameGap: 26, axisLabel: { color: css("--soft"), formatter: format, hideOverlap: true, showMaxLabel: xMax === "dataMax" }, axisPointer: { label: { formatter: (p) => name + " " + format(p.value) } }, splitLine: { show: false } }),
      ...rest,
    });
    follow(chart);
    return chart;
  };
  const yAxis = (name, extra = {}) => axis({ type: "value", scale: true, name, nameTextStyle: { color: css("--soft"), align: extra.position === "right" ? "right" : "left" }, splitNumber: 4, ...extra, axisLabel: { color: css("--soft"), formatter: (x) => short(x), hideOverlap: true, ...(extra.axisLabel || {}) } });
  const LOG = { type: "log", logBase: 2, min: (v) => v.min * 0.97, max: (v) => v.max * 1.03, axisLabel: { showMinLabel: false, showMaxLabel: false } };
  const shares = { axisLabel: { formatter: (x) => parseFloat((100 * x).toFixed(1)) + "%" } };

  // ---- head ----
  const BADGE = { running: "info", starting: "info", finished: "good", stale: "warn", stopped: "warn", failed: "bad", "gave up": "bad" };
  const GUARD = { nonfinite: "#c0362c", spike: "#e45756", skip: "#f58518", fallback: "#b279a2", recover: "#54a24b", saturation: "#eeca3b", underflow: "#72b7b2", sqnr: "#9d755d", noise: "#79706e", budget: "#d6336c", repair: "#2f9e44" };
  const guardColour = (what) => GUARD[what] || COLOURS[9];
  const head = (run) => {
    const s = run.summary;
    $("name").replaceChildren(s.name, ...(s.model ? [make("span", { class: "on" }, " training "), s.model] : []));
    $("sub").textContent = [s.world ? s.world + " x " + (s.device || "device") : s.device, s.layout, s.precision].filter(Boolean).join(", ");
    $("state").replaceChildren(make("span", { class: "badge " + BADGE[s.state], id: "badge" }, s.state), " " + s.why);
    const done = s.steps ? Math.min(1, s.step / s.steps) : 0;
    $("progress").style.width = 100 * done + "%";
    $("progress").dataset.state = s.state;
    $("progress").parentElement.setAttribute("aria-valuenow", String(Math.round(100 * done)));
    $("progress").parentElement.hidden = !s.steps;
    const guards = Object.entries(s.guard);
    const goodput = known(s.goodput) ? s.goodput : s.training_share;
    const cards = [
      ["step", number(s.step) + (s.steps ? " of " + number(s.steps) : ""), known(s.eta_s) ? duration(s.eta_s) + " left" : known(s.tokens) ? short(s.tokens) + " tokens" : "no step yet"],
      ["loss", shown(s.loss, digits(4)), known(s.eval_loss) ? "evaluation " + digits(4)(s.eval_loss) + " at step " + number(s.eval_step) : known(s.loss_mean) ? "mean of the last steps " + digits(4)(s.loss_mean) : "no finite loss yet"],
      ["tokens/s per GPU", shown(s.tokens_per_s_per_gpu, number), known(s.tflops) ? digits(4)(s.tflops) + " TFLOP/s per GPU" : "median of the last steps"],
      ["MFU", shown(s.mfu, percent), known(s.mfu_weighted) ? percent(s.mfu_weighted) + " of the formats' own peaks" : known(s.mfu) ? "of the bf16 peak" : known(s.step_s) ? "the device's peak is not known" : "no step yet"],
      ["peak memory", shown(s.peak_gib, (x) => digits(4)(x) + " GiB"), known(s.limit_gib) ? "of " + digits(4)(s.limit_gib) + " GiB, " + shown(s.peak_gib, (x) => percent(x / s.limit_gib, 0)) : "limit not known"],
      ["step time", shown(s.step_s, duration), known(s.predicted_over_real) ? "predicted " + duration(s.predicted_s) + ": " + s.predicted_over_real.toFixed(2) + " of real" : known(s.predicted_s) ? "predicted " + duration(s.predicted_s) : "no prediction"],
      ["goodput", shown(goodput, percent), known(s.training_share) ? "training " + percent(s.training_share) + " of " + duration(s.wall_s) : "of the wall time"],
      ["restarts", number(s.restarts), plural(s.lost_steps, "step") + " lost, " + number(s.skipped_steps) + " skipped"],
      ["guard events", number(guards.reduce((sum, [, n]) => sum + n, 0)), guards.map(([what, n]) => n + " " + what).join(", ") || "none"],
      ["checkpoints", number(s.saves), known(s.last_save_step) ? "last at step " + number(s.last_save_step) : "none committed"],
    ];
    $("verdict").replaceChildren(...cards.map(([label, value, small]) => make("div", { class: "card" }, make("span", { class: "label" }, label), make("span", { class: "value" }, value), make("span", { class: "small" }, small))));
    $("notes").replaceChildren(...run.notes.warnings.map((text) => make("p", { class: "warning" }, text)), ...run.notes.notes.map((text) => make("p", {}, text)));
    $("source").textContent = "Read from " + s.path + " at " + when(DATA.as_of) + "; the run began at " + when(s.began) + ", its last event is of " + when(s.last) + ".";
  };
  const controls = (run) => {
    const spans = [["", "off"], ...Object.keys(run.series.smooth || {}).map((span) => [span, span])];
    const host = $("controls");
    host.replaceChildren();
    if (RUNS.length > 1) host.append(segments("run", RUNS.map((one, i) => [i, one.summary.name]), state.run, (value) => set("run", value)));
    host.append(segments("over", [["step", "steps"], ["tokens", "tokens"], ["seconds", "hours"]], state.x, (value) => set("x", value)));
    if (spans.length > 1) host.append(segments("smoothing", spans, state.smooth, (value) => set("smooth", value)));
    host.append(tick("log", "log loss", state.log, (value) => set("log", value)));
  };

  // ---- several runs ----
  const FIGURES = [
    ["step", (s) => number(s.step), null], ["tokens", (s) => shown(s.tokens, short), null], ["loss", (s) => shown(s.loss_mean, digits(4)), (s) => s.loss_mean, -1],
    ["eval loss", (s) => shown(s.eval_loss, digits(4)), (s) => s.eval_loss, -1], ["tok/s/GPU", (s) => shown(s.tokens_per_s_per_gpu, number), (s) => s.tokens_per_s_per_gpu, 1],
    ["MFU", (s) => shown(s.mfu, percent), null], ["step time", (s) => shown(s.step_s, duration), (s) => s.step_s, -1], ["peak GiB", (s) => shown(s.peak_gib, digits(4)), (s) => s.peak_gib, -1],
    ["goodput", (s) => shown(known(s.goodput) ? s.goodput : s.training_share, percent), null], ["restarts", (s) => number(s.restarts), null], ["skipped", (s) => number(s.skipped_steps), null],
  ];
  const comparePanel = () => {
    const host = $("compare");
    const first = RUNS[0].summary;
    const rows = RUNS.map((run, i) => {
      const dot = make("span", { class: "dot" });
      dot.style.background = COLOURS[i % COLOURS.length];
      return make("tr", {}, make("td", { class: "w" }, dot, run.summary.name), cell(run.summary.state), ...FIGURES.map(([, text, of, better]) => {
        const node = cell(text(run.summary), "n");
        if (of && i && known(of(run.summary)) && of(first)) {
          const change = of(run.summary) / of(first) - 1;
          const small = make("div", { class: "small" }, Math.abs(change) < 0.0005 ? "same" : (change > 0 ? "+" : "") + percent(change));
          if (Math.abs(change) >= 0.0005) small.style.color = css(change * better > 0 ? "--good" : "--bad");
          node.append(small);
        }
        return node;
      }));
    });
    host.append(table([["run"], ["state"], ...FIGURES.map(([name]) => [name, "n"])], rows));
    const overlay = (title, of, y, extra) => {
      host.append(make("h3", {}, title));
      if (!RUNS.some(of)) return empty(host, "No run has logged this.");
      return curves(host, { height: 320, yAxis: y, series: RUNS.map((run, i) => line(run.summary.name, points(run, of(run)), COLOURS[i % COLOURS.length], extra)) });
    };
    const spanned = (run) => (state.smooth && run.series.smooth[state.smooth]) || run.series.loss;
    overlay("Loss", spanned, yAxis("loss", state.log ? LOG : {}));
    overlay("Tokens/s per GPU", (run) => run.series.throughput, yAxis("", { min: 0 }));
    const differences = Object.entries(DATA.compare.differences);
    host.append(make("h3", {}, "Settings that differ"));
    if (!differences.length) empty(host, "The runs have the same settings.");
    else listed(host, 20, differences, (drawn) => table([["setting"], ...RUNS.map((run) => [run.summary.name])], drawn.map(([name, values]) => make("tr", {}, cell(name, "path"), ...values.map((value) => cell(value || "–"))))));
  };

  // ---- curves ----
  const lossPanel = (run) => {
    const host = $("loss");
    const p = run.loss;
    if (p.why) return empty(host, p.why);
    const raw = points(run, run.series.loss);
    const smooth = state.smooth && run.series.smooth[state.smooth];
    const blue = COLOURS[0];
    const series = [line("loss", raw, blue, smooth ? { lineStyle: { color: blue, width: 1, opacity: 0.45 } } : {})];
    if (smooth) series.push(line("smoothed over " + state.smooth, points(run, smooth), blue, { lineStyle: { color: blue, width: 2.2 } }));
    if (p.evals.length) series.push(line("evaluation", p.evals.map((e) => [spot(e), e[3]]), COLOURS[1], { showSymbol: p.evals.length < 60, symbolSize: 6, lineStyle: { color: COLOURS[1], width: 2 } }));
    if (p.lost.length) series.push(line("lost steps", p.lost.map((e) => [spot(e), e[3]]), css("--soft"), { lineStyle: { color: css("--soft"), type: "dashed", width: 1.4 } }));
    const least = Math.min(...raw.map((q) => q[1]).filter(known), ...p.evals.map((e) => e[3]));
    const mark = (name, data, symbol, colour, size) => series.push({ name, type: "scatter", data, symbol, symbolSize: size, itemStyle: { color: colour, borderColor: css("--surface"), borderWidth: 1 }, z: 5 });
    if (p.nonfinite.length) mark("not finite", p.nonfinite.map((e) => [spot(e), Number.isFinite(least) ? least : 1]), "triangle", css("--bad"), 9);
    for (const [what, marks] of Object.entries(run.guard.marks)) {
      const at = marks.map((m) => [spot(m), known(m[3]) ? m[3] : least]);
      if (at.length) mark(what, at, "diamond", guardColour(what), 11);
    }
    const restarts = run.goodput.attempts.slice(1).map((a) => ({ xAxis: spot(a.x) }));
    if (restarts.length) series[0].markLine = { symbol: "none", silent: true, label: { show: false }, lineStyle: { color: css("--bad"), type: "dotted", width: 1.2 }, data: restarts };
    curves(host, { height: isNarrow() ? 360 : 420, slider: true, yAxis: yAxis("loss", state.log ? LOG : {}), series });
    const words = [];
    if (restarts.length) words.push("Dotted lines are restarts.");
    if (p.nonfinite_count) words.push("Triangles: the loss of " + plural(p.nonfinite_count, "step") + " is not finite.");
    if (words.length) host.append(make("p", { class: "legend" }, words.join(" ")));
  };
  const optimizerPanel = (run) => {
    const { grad_norm: norm, lr } = run.series;
    if (!norm && !lr) return empty($("optimizer"), "Neither a gradient norm nor a learning rate was logged yet.");
    curves($("optimizer"), { right: true, yAxis: [yAxis("grad norm", { min: 0 }), yAxis("lr", { position: "right", min: 0, splitLine: { show: false }, axisLabel: { formatter: (x) => (x ? x.toExponential(1) : "0") } })], series: [line("grad norm", points(run, norm), COLOURS[0]), line("learning rate", points(run, lr), COLOURS[1], { yAxisIndex: 1 })] });
  };
  const throughputPanel = (run) => {
    const { throughput, mfu, mfu_weighted: weighted } = run.series;
    const host = $("throughput");
    if (!throughput && !mfu) return empty(host, "No step with a time was logged yet.");
    const series = [line("tokens/s/GPU", points(run, throughput), COLOURS[0])];
    if (mfu) series.push(line("MFU", points(run, mfu), COLOURS[1], { yAxisIndex: 1 }));
    if (weighted) series.push(line("MFU of the formats' peaks", points(run, weighted), COLOURS[2], { yAxisIndex: 1 }));
    // Both follow the step time: the MFU has room above it, or one curve would hide the other.
    const top = mfu ? Math.ceil(14 * Math.max(...mfu.y, ...(weighted ? weighted.y : []))) / 10 : 1;
    curves(host, { right: true, yAxis: [yAxis("tokens/s/GPU", { min: 0 }), yAxis(mfu ? "MFU" : "", { position: "right", min: 0, max: top, splitLine: { show: false }, ...shares })], series });
    if (!mfu) host.append(make("p", { class: "legend" }, "No MFU: the peak of this device is not known."));
  };
  const memoryPanel = (run) => {
    const { memory_gib: used, memory_limit_gib: limit } = run.series;
    if (!used) return empty($("memory"), "No step with a memory figure was logged yet; a CPU run has none.");
    const top = Math.max(run.summary.peak_gib, run.summary.limit_gib || 0) * 1.08;
    const series = [line("peak of the step", points(run, used), COLOURS[0], { areaStyle: { opacity: 0.12 } })];
    if (limit) series.push(line("limit", points(run, limit), css("--bad"), { lineStyle: { color: css("--bad"), type: "dashed", width: 1.6 } }));
    curves($("memory"), { yAxis: yAxis("GiB", { min: 0, max: parseFloat(top.toPrecision(2)) }), series });
    if (!limit) $("memory").append(make("p", { class: "legend" }, "The limit is not known on this device."));
  };
  const predictedPanel = (run) => {
    const { seconds, predicted_s: predicted } = run.series;
    const s = run.summary;
    const host = $("predicted");
    if (!seconds) return empty(host, "No step with a time was logged yet.");
    const series = [line("measured", points(run, seconds), COLOURS[0])];
    if (predicted) series.push(line("predicted", points(run, predicted), COLOURS[1], { lineStyle: { color: COLOURS[1], type: "dashed", width: 2 } }));
    curves(host, { yAxis: yAxis("seconds", { type: "log", axisLabel: { formatter: (x) => short(x) + " s" } }), series });
    host.append(make("p", { class: "legend" }, known(s.predicted_over_real) ? "Predicted/real " + s.predicted_over_real.toFixed(3) + ": " + duration(s.predicted_s) + " predicted, " + duration(s.step_s) + " measured (median of the last steps)." : "The run has no plan with a predicted step time."));
  };

  // ---- guard ----
  const guardPanel = (run) => {
    const host = $("guard");
    const p = run.guard;
    if (p.why) return empty(host, p.why);
    const chosen = { what: "", q: "" };
    const list = make("div");
    const fill = () => {
      const words = chosen.q.toLowerCase().split(/\s+/).filter(Boolean);
      const rows = p.rows.filter((row) => (!chosen.what || row.what === chosen.what) && words.every((word) => Object.values(row).join(" ").toLowerCase().includes(word)));
      list.replaceChildren();
      if (!rows.length) return empty(list, "No event matches the filter.");
      listed(list, 15, rows, (drawn) => table([["step", "n"], ["what"], ["reason"], ["layer"], ["GEMM"], ["format"], ["rank", "n"]], drawn.map((row) => {
        const dot = make("span", { class: "dot" });
        dot.style.background = guardColour(row.what);
        return make("tr", { class: row.lost ? "lost" : "" }, cell(shown(row.step, number), "n"), make("td", { class: "k" }, dot, row.what), cell(row.reason + (row.lost ? " (lost with a restart)" : ""), "w"), cell(row.path || "–", "path"), cell(row.gemm || "–"), cell(row.from || row.to ? (row.from || "?") + " → " + (row.to || "?") : "–", "k"), cell(row.rank || "–", "n"));
      })));
    };
    const search = make("input", { type: "search", id: "guard-text", placeholder: "filter: layer, reason ...", "aria-label": "filter", oninput: (event) => { chosen.q = event.target.value; fill(); } });
    const select = make("select", { id: "guard-what", "aria-label": "what", onchange: (event) => { chosen.what = event.target.value; fill(); } }, make("option", { value: "" }, "all events"), ...Object.entries(p.counts).map(([what, n]) => make("option", { value: what }, what + " (" + n + ")")));
    host.append(make("div", { class: "filters" }, search, select), list);
    if (p.left_out) host.append(make("p", { class: "legend" }, number(p.left_out) + " events in the middle are left out of the table."));
    fill();
  };

  // ---- precision ----
  const precisionPanel = (run) => {
    const host = $("precision");
    const p = run.precision;
    if (p.why) return empty(host, p.why);
    const now = Object.entries(p.now).map(([format, share]) => {
      const dot = make("span", { class: "dot" });
      dot.style.background = formatColour(format);
      return make("span", {}, dot, format + " ", make("b", {}, percent(share)));
    });
    host.append(make("div", { class: "key" }, make("span", {}, plural(p.layers, "layer") + ", " + number(p.changed) + " changed; now, of all GEMMs:"), ...now));
    host.append(make("div", { class: "filters" }, segments("GEMM", [["all", "all"], ["fwd", "fwd"], ["dgrad", "dgrad"], ["wgrad", "wgrad"]], state.gemm, (value) => set("gemm", value)), tick("changed", "only layers that changed", state.changed, (value) => set("changed", value))));
    const rows = state.changed ? p.rows.filter((row) => row.spans.length > 1) : p.rows;
    if (!rows.length) return empty(host, "No layer changed its formats.");
    const gemms = state.gemm === "all" ? [0, 1, 2] : [["fwd", "dgrad", "wgrad"].indexOf(state.gemm)];
    const cells = [];
    rows.forEach((row, y) => row.spans.forEach((span) => gemms.forEach((gemm, band) => cells.push({ value: [span[0], y, span[1], band], gemm, row, format: span[2 + gemm] }))));
    const widest = isNarrow() ? 130 : 330;
    const room = Math.floor(widest / 6.6);
    const label = (name) => (name.length > room ? "…" + name.slice(1 - room) : name);
    const box = make("div", { class: "tall" });
    host.append(box);
    draw(box, 46 + (state.gemm === "all" ? 24 : 20) * rows.length, {
      grid: { left: 8, right: 24, top: 6, bottom: 34, containLabel: true },
      tooltip: tooltip({ formatter: (q) => escape(q.data.row.name) + "<br>" + ["fwd", "dgrad", "wgrad"][q.data.gemm] + " in <b>" + escape(q.data.format) + "</b>, steps " + number(q.value[0]) + " to " + number(q.value[2] - 1) }),
      xAxis: axis({ type: "value", min: 0, max: p.end, name: "step", nameLocation: "middle", nameGap: 22, axisLabel: { color: css("--soft"), formatter: (x) => number(x), hideOverlap: true, showMaxLabel: false }, splitLine: { show: false } }),
      yAxis: axis({ type: "category", inverse: true, data: rows.map((row) => label(row.name)), axisLabel: { color: css("--ink"), fontSize: 11, interval: 0 }, axisTick: { show: false } }),
      series: [{
        type: "custom", data: cells, encode: { x: [0, 2], y: 1 }, clip: true,
        renderItem: (params, api) => {
          const from = api.coord([api.value(0), api.value(1)]);
          const to = api.coord([api.value(2), api.value(1)]);
          const height = api.size([0, 1])[1] * 0.84;
          const band = height / gemms.length;
          return { type: "rect", shape: { x: from[0], y: from[1] - height / 2 + band * api.value(3), width: Math.max(1, to[0] - from[0]), height: Math.max(1, band - 0.6) }, style: { fill: formatColour(cells[params.dataIndex].format) } };
        },
      }],
    });
    const words = state.gemm === "all" ? ["The three bands of a row are fwd, dgrad and wgrad."] : [];
    if (p.left_out) words.push(number(p.left_out) + " rows that never changed are left out.");
    if (words.length) host.append(make("p", { class: "legend" }, words.join(" ")));
  };
  const formatColour = (format) => FORMATS[format.split(/[ :_(]/)[0]] || COLOURS[12];

  // ---- experts ----
  const expertsPanel = (run) => {
    const host = $("experts");
    const p = run.experts;
    if (p.why) return empty(host, p.why);
    const label = make("b", { id: "expert-step" });
    const wide = isNarrow() ? 14 : 34;
    const chart = (() => {
      const slider = make("input", { type: "range", id: "expert-frame", min: "0", max: String(p.frames.length - 1), value: String(p.frames.length - 1), "aria-label": "step", oninput: (event) => show(Number(event.target.value)) });
      host.append(make("div", { class: "filters" }, make("span", {}, "step ", label), slider));
      return draw(host, Math.min(560, 110 + Math.max(14, Math.min(22, 420 / p.layers.length)) * p.layers.length), {
        grid: { left: 8, right: 16, top: 8, bottom: 66, containLabel: true },
        tooltip: tooltip({ formatter: (q) => escape(p.layers[q.value[1]]) + "<br>expert " + q.value[0] + ": <b>" + q.value[2].toFixed(2) + "</b> of the mean" }),
        xAxis: axis({ type: "category", data: [...Array(p.experts).keys()].map(String), name: "expert", nameLocation: "middle", nameGap: 22, axisLabel: { color: css("--soft"), hideOverlap: true } }),
        yAxis: axis({ type: "category", inverse: true, data: p.layers.map((name) => (name.length > wide ? "…" + name.slice(1 - wide) : name)), axisLabel: { color: css("--ink"), fontSize: 11, hideOverlap: true } }),
        visualMap: { type: "continuous", min: 0, max: 2, calculable: false, orient: "horizontal", left: "center", bottom: 0, itemWidth: 12, itemHeight: 160, text: ["2 x mean", "0"], textStyle: { color: css("--soft") }, inRange: { color: ["#2b6cb0", "#a9c6e3", css("--chip"), "#f3b58a", "#d9480f"] } },
        series: [{ id: "load", type: "heatmap", data: [], itemStyle: { borderColor: css("--surface"), borderWidth: p.experts * p.layers.length > 4000 ? 0 : 1 } }],
      });
    })();
    const show = (at) => {
      const frame = p.frames[at];
      label.textContent = frame.from === frame.to ? number(frame.from) : number(frame.from) + " to " + number(frame.to) + " (mean)";
      chart.setOption({ series: [{ id: "load", data: frame.load.flatMap((loads, y) => loads.map((load, x) => [x, y, load])) }] });
    };
    show(p.frames.length - 1);
    host.append(make("h3", {}, "Imbalance and dropped tokens"));
    const series = [line("fullest expert of the worst layer", p.worst, COLOURS[4]), line("fullest expert, mean of the layers", p.typical, COLOURS[0])];
    if (p.dropped.length) series.push(line("dropped tokens", p.dropped, COLOURS[1], { yAxisIndex: 1 }));
    if (p.entropy.length) series.push(line("entropy of the routers", p.entropy, COLOURS[2], { yAxisIndex: 1 }));
    draw(host, 260, {
      grid: { left: 8, right: 8, top: isNarrow() ? 58 : 48, bottom: 26, containLabel: true }, legend: keys(series), tooltip: tooltip({ trigger: "axis", valueFormatter: digits(3) }),
      xAxis: axis({ type: "value", min: "dataMin", max: "dataMax", name: "step", nameLocation: "middle", nameGap: 26, axisLabel: { color: css("--soft"), formatter: (x) => number(x), hideOverlap: true }, splitLine: { show: false } }),
      yAxis: [yAxis("x the mean", { min: 1 }), yAxis(p.dropped.length || p.entropy.length ? "share" : "", { position: "right", min: 0, splitLine: { show: false }, ...shares })], series,
    });
    host.append(make("p", { class: "legend" }, p.dropped.length ? number(p.dropped_total) + " of " + number(p.routed_total) + " routed tokens in these events were dropped." : "How many tokens were dropped was not logged."));
  };

  // ---- time ----
  const PARTS = { training: ["training", "#2f9e6a"], starting: ["starting, compiling, first step", "#4c78a8"], evaluation: ["evaluation", "#72b7b2"], saving: ["waiting for a save", "#eeca3b"], "skipped steps": ["skipped steps", "#f58518"], "lost steps": ["lost steps", "#e45756"], down: ["down between attempts", "#8b2e2e"], other: ["other: data, logging, waiting", "#9aa4b0"] };
  const goodputPanel = (run) => {
    const host = $("goodput");
    const p = run.goodput;
    if (p.why) return empty(host, p.why);
    const parts = Object.entries(p.shares);
    const total = parts.reduce((sum, [, s]) => sum + s, 0);
    const bar = make("div", { class: "shares" });
    const key = make("div", { class: "key" });
    for (const [name, seconds] of parts) {
      const [word, colour] = PARTS[name];
      const piece = make("div", { title: word + ": " + duration(seconds) });
      piece.style.background = colour;
      piece.style.flex = String(seconds) + " 0 0";
      bar.append(piece);
      const dot = make("span", { class: "dot" });
      dot.style.background = colour;
      key.append(make("span", {}, dot, word + " ", make("b", {}, percent(seconds / total)), " " + duration(seconds)));
    }
    host.append(bar, key, make("h3", {}, "Attempts: their ranks; gaps are down time"));
    const lane = make("div", { class: "lane" });
    const end = Math.max(...p.attempts.map((a) => a.ended), 1e-9);
    const put = (from, to, colour, text, title) => {
      const node = make("div", { title }, (to - from) / end > 0.06 ? text : "");
      node.style.left = (100 * from) / end + "%";
      node.style.width = (100 * (to - from)) / end + "%";
      node.style.background = colour;
      lane.append(node);
    };
    p.attempts.forEach((a, i) => {
      const what = "attempt " + (i + 1) + (known(a.world) ? " on " + plural(a.world, "rank") : "");
      const steps = known(a.first_step) ? ", steps " + number(a.first_step) + " to " + number(a.last_step) : ", no step";
      const ready = known(a.ready) ? a.ready : a.ended;
      put(a.began, ready, PARTS.starting[1], "", what + ": starting " + duration(ready - a.began));
      put(ready, a.ended, PARTS.training[1], known(a.world) ? "x" + a.world : "", what + steps + ", " + duration(a.ended - ready));
    });
    host.append(lane, make("div", { class: "ends" }, make("span", {}, "0"), make("span", {}, duration(end))));
    if (p.restarts.length) {
      host.append(make("h3", {}, "Restarts"));
      listed(host, 10, p.restarts, (drawn) => table([["generation", "n"], ["from step", "n"], ["lost steps", "n"], ["recovery", "n"], ["ranks", "n"], ["reason"]], drawn.map((row) => make("tr", {}, cell(shown(row.generation, number), "n"), cell(shown(row.step, number), "n"), cell(shown(row.lost_steps, number), "n"), cell(shown(row.recovery_s, duration), "n"), cell(shown(row.world, number), "n"), cell(row.reason, "w")))));
    } else host.append(make("p", { class: "legend" }, run.summary.restarts ? "Why the run began again was not logged." : "The run was not restarted."));
  };

  // ---- checkpoints and settings ----
  const checkpointsPanel = (run) => {
    const host = $("checkpoints");
    const p = run.checkpoints;
    if (p.why) return empty(host, p.why);
    const last = scaled(run.x[state.x][run.x[state.x].length - 1]);
    const bar = (rows, colour, name) => ({ name, type: "bar", barMaxWidth: 14, barMinHeight: 2, barGap: "-100%", itemStyle: { color: colour }, data: rows.map((row) => [spot(row.x), row.stall_s || 0]) });
    const good = p.rows.filter((row) => row.committed);
    const bad = p.rows.filter((row) => !row.committed);
    curves(host, { height: 220, xMin: 0, xMax: 1.02 * Math.max(last || 0, ...p.rows.map((row) => spot(row.x))), yAxis: yAxis("stall", { min: 0, axisLabel: { formatter: (x) => (x ? duration(x) : "0") } }), series: [bar(good, COLOURS[0], "committed"), ...(bad.length ? [bar(bad, css("--bad"), "not committed")] : [])] });
    listed(host, 8, [...p.rows].reverse(), (drawn) => table([["step", "n"], ["stall", "n"], ["write", "n"], ["size", "n"], ["state"], ["path"]], drawn.map((row) => make("tr", { class: row.lost ? "lost" : "" }, cell(shown(row.step, number), "n"), cell(shown(row.stall_s, duration), "n"), cell(shown(row.seconds, duration), "n"), cell(shown(row.bytes, bytes), "n"), cell(row.committed ? "committed" : "not committed", row.committed ? "good" : "bad"), cell(row.path + (row.error ? ": " + row.error : ""), "path")))));
    if (p.left_out) host.append(make("p", { class: "legend" }, number(p.left_out) + " earlier saves are left out."));
  };
  const settingsPanel = (run) => {
    const rows = Object.entries(run.settings.rows);
    if (!rows.length) return empty($("settings"), run.settings.why);
    $("settings").append(make("div", { class: "settings" }, ...rows.map(([name, value]) => make("div", {}, make("span", {}, name), make("span", {}, value || "–")))));
  };

  const paint = () => {
    COLOURS = dark.matches ? LIGHTER : PAGE.COLOURS;
    const run = RUNS[state.run];
    PAGE.clear();
    linked = [];
    for (const body of document.querySelectorAll(".body")) { body.style.minHeight = body.offsetHeight + "px"; body.replaceChildren(); }
    head(run);
    controls(run);
    if (DATA.compare) comparePanel();
    for (const panel of [lossPanel, optimizerPanel, throughputPanel, memoryPanel, predictedPanel, guardPanel, precisionPanel, expertsPanel, goodputPanel, checkpointsPanel, settingsPanel]) panel(run);
    for (const body of document.querySelectorAll(".body")) body.style.minHeight = "";
  };
  const CURVES = { optimizer: ["grad_norm", "lr"], throughput: ["throughput", "mfu", "mfu_weighted", "tflops"], memory: ["memory_gib", "memory_limit_gib"], predicted: ["seconds", "predicted_s", "ratio"], loss: ["loss"] };
  const data = (panel) => {
    const run = RUNS[state.run];
    if (panel === "compare") return { ...DATA.compare, runs: RUNS.map((one) => one.summary) };
    if (!(panel in CURVES)) return run[panel];
    // Curves are copied with their steps: the page keeps those in one table for all of them.
    const whole = (series) => series && { step: series.i.map((at) => run.x.step[at]), y: series.y };
    return { ...Object.fromEntries(CURVES[panel].map((name) => [name, whole(run.series[name])])), ...(panel === "loss" ? { events: run.loss } : {}) };
  };
  readState();
  paint();
  PAGE.copying(data);
  dark.addEventListener("change", paint);
  document.documentElement.dataset.ready = "yes";
})();
