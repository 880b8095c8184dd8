// One plot: lines of all shown runs, with what lies between lowest and highest, and a line that tells the values.

const SYNC = uPlot.sync("plots");
const TALL = innerWidth > 2700 ? 1.35 : 1; // plots of a very wide page are taller
const GAP = 5; // steps

/** A line of every step has a gap where some are not known, such as those whose records are not written yet. */
function withGaps(group, series) {
  const x = group.x[state.axis], y = series.mean, step = group.x.step;
  if (series.low) return { x, y };
  const xs = [], ys = [];
  for (let i = 0; i < x.length; i++) {
    if (i && step[i] - step[i - 1] > GAP) { xs.push((x[i - 1] + x[i]) / 2); ys.push(NaN); }
    xs.push(x[i]); ys.push(y[i]);
  }
  return xs.length > x.length ? { x: Float64Array.from(xs), y: Float32Array.from(ys) } : { x, y };
}

const runColour = (run) => colour(`run${run % 8}`);

/**
 * spec: {key, title, unit, help, height, full, log, zero, lines: [{group, name, label, tone}], apart: bool,
 * extra(run): more series, [{x, y, label, stroke, kind}], points if no kind is given}; without lines, they are the plot
 */
function makePlot(spec) {
  const values = el("span.values"), body = el("div.body"), note = el("span.unit", {}, spec.unit ? ` ${spec.unit}` : "");
  const card = el("figure.plot", { id: `plot-${spec.key}` },
    el("figcaption", { title: spec.help }, el("b", {}, spec.title), note, values), body);
  let plot = null, drawn = [], made = "";

  const runs = () => [...state.shown].filter((run) => state.plots[run]).sort((a, b) => (a === state.focus) - (b === state.focus));

  /** Everything to draw, in order: {x, y, low, high, options}. */
  function layers() {
    const found = [];
    for (const run of runs()) {
      const plots = state.plots[run], main = run === state.focus, several = state.shown.size > 1;
      if (spec.apart && main) {
        const undone = plots.undone, refused = plots.refused;
        const faint = undone.series[spec.apart];
        if (faint) found.push({ x: undone.x[state.axis], y: faint.mean, kind: "undone", label: "undone", run });
        const bad = refused.series[spec.apart];
        if (bad || refused.count) {
          const x = refused.x[state.axis], y = bad ? (bad.high || bad.mean) : new Float32Array(x.length).fill(NaN);
          found.push({ x, y, kind: "refused", label: "refused", run });
        }
      }
      spec.lines.forEach((line, n) => {
        const group = plots[line.group || "accepted"], series = group.series[line.name];
        if (!series || (several && n && !main)) return;
        found.push({
          ...(line.group ? { x: group.x[state.axis], y: series.mean } : withGaps(group, series)), low: series.low, high: series.high, kind: "line", run,
          label: line.label, stroke: several && !n ? runColour(run) : colour(line.tone || "run0"), main, style: line,
          sparse: line.group === "sometimes",
        });
        if (main && line.trend && plots.trend) {
          found.push({ x: group.x[state.axis], low: plots.trend.low, high: plots.trend.high, kind: "band", run });
        }
      });
      if (spec.extra) {
        const stroke = several ? runColour(run) : colour("valid");
        for (const more of spec.extra(run)) found.push({ stroke, kind: "points", style: {}, main, ...more, run });
      }
    }
    return found;
  }

  /** New data go into the plot that is there, so that a drag is not disturbed; another number of lines needs a new one. */
  function update(fromScratch) {
    drawn = layers().filter((layer) => layer.x && layer.x.length);
    const lines = drawn.filter((layer) => layer.kind === "line" || !spec.lines.length);
    card.hidden = !lines.length || (spec.constant && lines.every(({ y }) => y.every((v) => v === y[0])));
    const key = drawn.map((layer) => `${layer.kind} ${layer.label} ${layer.run} ${layer.low ? 1 : 0} ${layer.stroke}`).join() + state.axis;
    if (plot && (fromScratch || card.hidden || key !== made)) { plot.destroy(); plot = null; }
    if (card.hidden) return;
    made = key;
    const tables = [], series = [{}], bands = [];
    for (const layer of drawn) {
      const table = [layer.x];
      if (layer.low) {
        table.push(layer.high, layer.low);
        const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
        bands.push({ series: [series.length, series.length + 1], fill: band(layer) });
        series.push({ ...edge }, { ...edge });
      }
      if (layer.y) {
        table.push(layer.y);
        series.push(stroke(layer));
      }
      tables.push(table);
    }
    // uPlot.join tells apart null, a gap, and undefined, which is none.
    const data = tables.length > 1 ? uPlot.join(tables.map(plain)) : plain(tables[0]);
    if (plot) plot.setData(data, false); else plot = new uPlot(options(series, bands), data, body);
    plot.setScale("x", { min: view()[0], max: view()[1] });
    if (!(plot.cursor.left >= 0)) fill(values, legend());
  }

  /** What the lines of the run in focus are, if there are several. */
  function legend() {
    const named = drawn.filter((layer) => layer.run === state.focus && layer.y && ["line", "points"].includes(layer.kind));
    return named.length < 2 ? [] : named.map((layer) => el("span", {}, dotOf(layer), layer.label));
  }

  function dotOf(layer) {
    const dot = el("i");
    dot.style.background = layer.kind === "refused" ? colour("bad") : layer.kind === "undone" ? colour("soft") : layer.stroke;
    return dot;
  }

  const build = () => update(true);

  const plain = (table) => table.map((column, n) => (n ? Array.from(column, (v) => (Number.isNaN(v) ? null : v)) : Array.from(column)));

  function band(layer) {
    const fade = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");
    return layer.kind === "band" ? fade(colour("trend"), isDark() ? 0.2 : 0.16) : fade(layer.stroke, 0.28);
  }

  function stroke(layer) {
    if (layer.kind === "refused") return { stroke: colour("bad"), width: 2, paths: () => null, points: { show: true, size: 8, width: 2, paths: crosses } };
    if (layer.kind === "undone") return { stroke: colour("soft"), paths: () => null, points: { show: true, size: layer.sparse ? 6 : 3, fill: colour("soft"), width: 0 } };
    if (layer.kind === "points") return { stroke: layer.stroke, width: 1.5, spanGaps: true, dash: [4, 3], points: { show: true, size: 6, fill: colour("card"), width: 2 } };
    return {
      stroke: layer.stroke, width: layer.main ? 1.6 : 1.2, spanGaps: layer.sparse, alpha: layer.main ? 1 : 0.85,
      fill: layer.style.area ? layer.stroke + "26" : undefined,
      points: { show: layer.x.length < 2 || (layer.sparse && layer.x.length < 60), size: 4, fill: layer.stroke, width: 0 },
    };
  }

  function options(series, bands) {
    const grid = { stroke: colour("grid"), width: 1 }, font = '12px system-ui, "DejaVu Sans", sans-serif';
    const log = state.log && spec.log;
    const axis = { stroke: colour("soft"), grid, ticks: { show: false }, font };
    return {
      width: Math.max(120, body.clientWidth), height: spec.height * TALL, ms: 1e-3, padding: [spec.full ? 20 : 8, 16, 0, 0],
      legend: { show: false }, series, bands,
      cursor: {
        sync: { key: SYNC.key, setSeries: false, scales: ["x", null] }, drag: { x: true, y: false, setScale: false },
        points: { show: false }, y: false, bind: { dblclick: (u) => () => { zoom(null); } },
      },
      scales: { x: { time: false, auto: false }, y: { distr: log ? 3 : 1, range: log ? undefined : (u, min, max) => limits(min, max) } },
      axes: [
        { ...axis, size: 26, gap: 4, incrs: INCREMENTS[state.axis], values: (u, splits) => splits.map((v) => (v === null ? "" : tick(state.axis, v))) },
        { ...axis, size: 58, gap: 6, values: (u, splits) => splits.map((v) => (v === null ? "" : spec.share ? `${number(100 * v, 3)} %` : number(v, 3))) },
      ],
      hooks: {
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          const from = u.posToVal(u.select.left, "x"), to = u.posToVal(u.select.left + u.select.width, "x");
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          zoom([from, to]);
        }],
        setCursor: [tellValues],
      },
      plugins: [marks(spec.full)],
    };
  }

  function limits(min, max) {
    if (min === null || max === null || !Number.isFinite(min + max)) return [0, 1];
    if (spec.zero) return [Math.min(0, min), max > 0 ? max * 1.05 : 1];
    const room = (max - min || Math.abs(max) || 1) * 0.06;
    return [min - room, max + room];
  }

  /** ✕ for updates that were refused; at the upper edge if the loss was not finite. */
  function crosses(u, n) {
    const path = new Path2D(), r = 4.5 * uPlot.pxRatio, x = u.data[0], y = u.data[n], { min, max } = u.scales.x;
    const refused = drawn.find((layer) => layer.kind === "refused"), mine = new Set(refused ? refused.x : []);
    for (let i = 0; i < x.length; i++) {
      if (x[i] < min || x[i] > max || !mine.has(x[i])) continue;
      const a = u.valToPos(x[i], "x", true);
      const b = y[i] === null || y[i] === undefined ? u.bbox.top + r : Math.max(u.bbox.top + r, u.valToPos(y[i], "y", true));
      path.moveTo(a - r, b - r); path.lineTo(a + r, b + r);
      path.moveTo(a + r, b - r); path.lineTo(a - r, b + r);
    }
    return { stroke: path, fill: null, clip: null, flags: 2 };
  }

  function tellValues(u) {
    const { left } = u.cursor;
    if (left === null || left < 0) { fill(values, legend()); return; }
    const at = u.posToVal(left, "x"), told = [];
    let where = null;
    for (const layer of drawn) {
      if (!layer.y) continue;
      const i = nearest(layer.x, at);
      if (i < 0) continue;
      const apart = Math.abs(u.valToPos(layer.x[i], "x") - left);
      if (apart > (layer.kind === "line" && !layer.sparse ? 40 : 6) && layer.kind !== "line") continue;
      if (where === null && layer.kind === "line") where = layer.x[i];
      const spread = layer.low && layer.high[i] > layer.low[i] ? ` (${shown(layer.low[i])} to ${shown(layer.high[i])})` : "";
      const name = state.shown.size > 1 ? `${state.heads[layer.run].name} ${layer.label}` : layer.label;
      told.push(el("span", {}, dotOf(layer), `${name} ${shown(layer.y[i])}${spread}`));
    }
    fill(values, el("span.at", {}, place(state.axis, where === null ? at : where)), told);
  }

  const shown = (v) => (spec.share ? percent(v) : number(v));

  new ResizeObserver(() => {
    if (plot && Math.abs(plot.width - body.clientWidth) > 1) plot.setSize({ width: body.clientWidth, height: spec.height * TALL });
    else if (!plot && !card.hidden && body.clientWidth) build();
  }).observe(body);
  state.on("plots", () => update(false));
  state.on("theme log axis", build);
  state.on("range", () => { if (plot) plot.setScale("x", { min: view()[0], max: view()[1] }); });
  state.on("panels", () => { if (spec.extra || !plot) update(false); else plot.redraw(false); });
  card.plot = () => plot;
  return card;
}
