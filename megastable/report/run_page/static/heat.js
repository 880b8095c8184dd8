// Heat maps: layers from below (top row: the first) over the axis of the plots.

const SCALE = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];
const LEFT = 58, RIGHT = 8, FOOT = 20; // as in the plots

function hue(share) {
  const at = Math.min(0.9999, Math.max(0, share)) * (SCALE.length - 1), i = Math.floor(at), f = at - i;
  return SCALE[i].map((v, n) => Math.round(v + f * (SCALE[i + 1][n] - v)));
}

/** Colours go from the 1st to the 99th percentile, by size or, over more than a factor of 30, by its logarithm. */
function scaleOf(values) {
  const sorted = Float32Array.from(values.filter((v) => Number.isFinite(v))).sort();
  if (!sorted.length) return null;
  const at = (q) => sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
  const low = at(0.01), high = at(0.99), log = low > 0 && high / low > 30;
  const a = log ? Math.log(low) : low, b = log ? Math.log(high) : high;
  return { low, high, log, of: (v) => (b > a ? ((log ? Math.log(Math.max(v, low)) : v) - a) / (b - a) : 0.5) };
}

const fixedScale = ([low, high]) => ({ low, high, log: false, of: (v) => (v - low) / (high - low) });

function heatMap(kind, map) {
  const layers = map.layers.length, looks = map.looks, scale = kind.scale ? fixedScale(kind.scale) : scaleOf(kind.values);
  // Layers without any value of this kind are left out.
  const rows = map.layers.map((_, n) => n).filter((n) => {
    for (let i = 0; i < looks; i++) if (Number.isFinite(kind.values[n * looks + i])) return true;
    return false;
  });
  const told = el("span.values");
  const row = Math.max(3, Math.min(16, Math.floor(260 / Math.max(1, rows.length))));
  const x = map.x[state.axis], edges = edgesOf(x);
  const canvas = drawing(rows.length * row + FOOT, (pen, width) => {
    const [from, to] = view(), wide = width - LEFT - RIGHT;
    const at = (v) => LEFT + ((v - from) / (to - from)) * wide;
    pen.save();
    pen.beginPath(); pen.rect(LEFT, 0, wide, rows.length * row); pen.clip();
    pen.fillStyle = colour("code"); pen.fillRect(LEFT, 0, wide, rows.length * row);
    for (let i = 0; i < looks; i++) {
      const a = at(edges[i]), b = at(edges[i + 1]);
      if (b < LEFT || a > width) continue;
      rows.forEach((n, place_) => {
        const v = kind.values[n * looks + i];
        if (!Number.isFinite(v)) return;
        pen.fillStyle = `rgb(${hue(scale.of(v)).join()})`;
        pen.fillRect(a, place_ * row, Math.max(1, b - a) + 0.5, row);
      });
    }
    const panel = state.panels[state.focus];
    for (const incident of panel ? panel.incidents : []) {
      const a = Math.round(at(incident.x[state.axis])) + 0.5;
      pen.strokeStyle = "rgba(255,255,255,.85)"; pen.setLineDash([3, 3]);
      pen.beginPath(); pen.moveTo(a, 0); pen.lineTo(a, rows.length * row); pen.stroke();
    }
    pen.restore();
    pen.fillStyle = colour("soft"); pen.font = '11px system-ui, "DejaVu Sans", sans-serif'; pen.textAlign = "right"; pen.textBaseline = "middle";
    const every = Math.ceil(13 / row);
    rows.forEach((n, place_) => {
      if (place_ % every && row < 13) return;
      pen.fillText(shortened(map.layers[n]), LEFT - 6, place_ * row + row / 2, LEFT - 8); // narrower letters, if it is too long
    });
    pen.textBaseline = "alphabetic";
    pen.textAlign = "center";
    for (const value of ticks(state.axis, from, to)) pen.fillText(tick(state.axis, value), Math.min(at(value), LEFT + wide - 8), rows.length * row + 14);
  });
  canvas.addEventListener("mousemove", (event) => {
    const [from, to] = view(), wide = canvas.clientWidth - LEFT - RIGHT;
    const value = from + ((event.offsetX - LEFT) / wide) * (to - from), n = rows[Math.floor(event.offsetY / row)];
    const i = below(edges, value);
    if (n === undefined || i < 0 || i >= looks) { fill(told); return; }
    fill(told, `${map.layers[n]}, ${place(state.axis, x[i])}: ${number(kind.values[n * looks + i])}`);
  });
  canvas.addEventListener("mouseleave", () => fill(told));
  canvas.addEventListener("dblclick", () => zoom(null));
  const ramp = el("span.ramp", { title: scale && scale.log ? "logarithmic" : "linear" });
  const legend = scale ? el("span.legend", {}, number(scale.low, 3), ramp, number(scale.high, 3), scale.log ? " log" : "") : null;
  const figure = el("figure.plot.heat", { id: `heat-${kind.kind}` }, el("figcaption", {}, el("b", {}, kind.title), el("span.unit", {}, kind.unit ? ` ${kind.unit}` : ""), legend, told), canvas);
  return { figure, canvas };
}

/** What fits beside a map; the end of a long name tells more than its beginning. */
function shortened(name) {
  const told = name.startsWith("block ") ? name.slice(6) : name.replace(" GPU ", ":");
  return told.length > 13 ? `…${told.slice(-12)}` : told;
}


/** A look stands for the time from halfway to the one before it to halfway to the next. */
function edgesOf(x) {
  const edges = new Float64Array(x.length + 1);
  for (let i = 1; i < x.length; i++) edges[i] = (x[i - 1] + x[i]) / 2;
  if (x.length) { edges[0] = x.length > 1 ? Math.max(0, 2 * x[0] - edges[1]) : 0; edges[x.length] = x.length > 1 ? 2 * x[x.length - 1] - edges[x.length - 1] : Infinity; }
  if (x.length === 1) edges[1] = x[0] * 2 || 1;
  return edges;
}

function makeHeat() {
  const box = el("div.plots"), note = el("p.note");
  const whole = section("layers", "Layers", "", note, box);
  let maps = [];
  const build = () => {
    const map = state.heats[state.focus];
    whole.hidden = !map || !map.kinds.length || !map.looks;
    if (whole.hidden) return;
    fill(note, `Largest value in each layer, the first layer on top, ${map.of > map.looks ? `${commas(map.looks)} of ${plural(map.of, "record")}; zoom in for the others` : plural(map.looks, "record")}.`);
    maps = map.kinds.map((kind) => heatMap(kind, map));
    fill(box, maps.map((one) => one.figure));
  };
  const paint = () => maps.forEach((one) => one.canvas.paint());
  state.on("heats theme axis", build);
  state.on("range panels", paint);
  return whole;
}
