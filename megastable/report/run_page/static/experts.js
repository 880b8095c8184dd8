// Loads of routed experts: layers by experts at one moment, and the experts of one layer over the axis of the plots.
// A file has this script only where a run has experts.

const NO_LOAD = 0xFFFF; // of an expert that is not recorded
const NAMED_DEAD = 8;

/** Colours of loads: the card's for the mean, one hue below it and one above, up to a quarter and to four times it. */
function loadColours() {
  const parts = (name) => [1, 3, 5].map((i) => parseInt(colour(name).slice(i, i + 2), 16));
  const mean = colour("card").length === 7 ? parts("card") : [255, 255, 255], below = parts("run0"), above = parts("run1");
  return (load) => {
    const octaves = Math.max(-2, Math.min(2, Math.log2(load)));
    return `rgb(${mean.map((v, n) => Math.round(v + ((octaves < 0 ? below : above)[n] - v) * Math.abs(octaves) / 2)).join()})`;
  };
}

/**
 * A grid of loads, in hundredths of the mean. edges(width): where columns begin and end, in pixels from the left of the grid.
 * load(row, column); columnLabels(width): [[pixel, text]]; told(row, column): text; pick(row, column): on a click
 */
function loadMap({ id, title, unit, rows, columns, edges, load, columnLabels, told, pick }) {
  const shown = el("span.values");
  const row = Math.max(2, Math.min(18, Math.floor(300 / rows.length))), high = rows.length * row;
  const canvas = drawing(high + FOOT, (pen, width) => {
    const wide = width - LEFT - RIGHT, at = edges(wide), hueOf = loadColours();
    pen.save();
    pen.beginPath(); pen.rect(LEFT, 0, wide, high); pen.clip();
    pen.fillStyle = colour("code"); pen.fillRect(LEFT, 0, wide, high);
    for (let c = 0; c < columns; c++) {
      const left = LEFT + at[c], cell = at[c + 1] - at[c], line = cell > 6 && row > 6 ? 1 : 0;
      if (left > width || left + cell < LEFT) continue;
      for (let r = 0; r < rows.length; r++) {
        const value = load(r, c);
        if (value === NO_LOAD) continue;
        pen.fillStyle = value ? hueOf(value / 100) : colour("ink");
        pen.fillRect(left, r * row, Math.max(1, cell - line) + (line ? 0 : 0.5), row - line);
      }
    }
    pen.restore();
    pen.strokeStyle = colour("line2"); pen.strokeRect(LEFT + 0.5, 0.5, wide - 1, high - 1);
    pen.fillStyle = colour("soft"); pen.font = '11px system-ui, "DejaVu Sans", sans-serif'; pen.textAlign = "right"; pen.textBaseline = "middle";
    const every = Math.ceil(13 / row);
    rows.forEach((name, n) => { if (n % every === 0) pen.fillText(name, LEFT - 6, n * row + Math.max(row, 10) / 2); });
    pen.textAlign = "center"; pen.textBaseline = "alphabetic";
    for (const [place_, text] of columnLabels(wide)) pen.fillText(text, LEFT + place_, high + 14);
  });
  const found = (event) => {
    const at = edges(canvas.clientWidth - LEFT - RIGHT), r = Math.floor(event.offsetY / row), c = below(at, event.offsetX - LEFT);
    return r < rows.length && c >= 0 && c < columns && load(r, c) !== NO_LOAD ? [r, c] : null;
  };
  canvas.addEventListener("mousemove", (event) => { const cell = found(event); fill(shown, cell ? told(...cell) : ""); });
  canvas.addEventListener("mouseleave", () => fill(shown));
  canvas.addEventListener("click", (event) => { const cell = found(event); if (cell) pick(...cell); });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${title}, ${unit}`);
  return el("figure.plot.heat", { id }, el("figcaption", {}, el("b", {}, title), el("span.unit", {}, ` ${unit}`), shown), canvas);
}

function makeExperts() {
  const note = el("p.note"), box = el("div.plots"), when = el("span.note"), ramp = el("span.ramp"), swatch = el("i");
  const slider = el("input", { type: "range", min: "0", "aria-label": "moment that is shown", oninput: () => choose(Number(slider.value)) });
  const whole = section("loads", "Load of experts", "", note, el("div.tools", {}, el("label", {}, "moment ", slider), when, el("span.grow"),
    el("span.heat", {}, el("span.legend", {}, "a quarter of the mean or less", ramp, "four times it or more", swatch, "no token"))), box);
  let experts = null, loads = null, moment = 0, chosen = null; // chosen: a row of blocks; null: the one with the largest load
  const load = (m, b, e) => loads[(m * experts.blocks.length + b) * experts.count + e];
  const times = (value) => (value ? `${number(value / 100, 3)} times the mean` : "no token");

  /** Largest load of a moment with its place, and the experts without tokens. */
  function survey() {
    let largest = -1, place_ = [0, 0], all = 0;
    const dead = [];
    for (let b = 0; b < experts.blocks.length; b++) {
      for (let e = 0; e < experts.count; e++) {
        const value = load(moment, b, e);
        if (value === NO_LOAD) continue;
        all++;
        if (value > largest) { largest = value; place_ = [b, e]; }
        if (!value) dead.push(`${e} of block ${experts.blocks[b]}`);
      }
    }
    return { largest, block: place_[0], expert: place_[1], all, dead };
  }

  function choose(m) {
    moment = m;
    draw();
  }

  function draw() {
    const { largest, block, expert, all, dead } = survey(), x = experts.x[state.axis], blocks = experts.blocks.length;
    const layer = chosen === null || chosen >= blocks ? block : chosen, now = place(state.axis, x[moment]);
    slider.max = String(x.length - 1);
    slider.value = String(moment);
    slider.setAttribute("aria-valuetext", now);
    fill(when, now);
    ramp.style.background = `linear-gradient(90deg, ${colour("run0")}, ${colour("card")}, ${colour("run1")})`;
    ramp.style.border = `1px solid ${colour("line2")}`;
    swatch.style.background = colour("ink");
    const without = dead.length ? `${commas(dead.length)} of ${plural(all, "expert")} got no token: ${dead.slice(0, NAMED_DEAD).join(", ")}${dead.length > NAMED_DEAD ? " and others" : ""}.` : "Every expert got tokens.";
    const said = `${now[0].toUpperCase()}${now.slice(1)}: the largest load is ${times(largest)}, of expert ${expert} in block ${experts.blocks[block]}. ${without}`;
    fill(note, `${said} Tokens of an expert over the mean of its layer; a click on a layer or a moment shows it.`);
    // Many experts need the whole width.
    box.style.gridTemplateColumns = experts.count > 32 ? "1fr" : "repeat(auto-fit, minmax(min(100%, 30rem), 1fr))";
    const cells = (wide) => Array.from({ length: experts.count + 1 }, (_, e) => e * wide / experts.count);
    const step = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024].find((one) => experts.count / one <= 16) || 2048;
    const numbers = Array.from({ length: Math.ceil(experts.count / step) }, (_, n) => n * step);
    const bounds = edgesOf(x), at = (value, wide) => { const [from, to] = view(); return (value - from) / (to - from) * wide; };
    fill(box, loadMap({
      id: "loads-layers", title: "Layers by experts", unit: `at ${now}`, rows: experts.blocks.map(String), columns: experts.count,
      edges: cells, load: (b, e) => load(moment, b, e), columnLabels: (wide) => numbers.map((e) => [(e + 0.5) * wide / experts.count, String(e)]),
      told: (b, e) => `block ${experts.blocks[b]}, expert ${e}: ${times(load(moment, b, e))}`, pick: (b) => { chosen = b; draw(); },
    }), loadMap({
      id: "loads-time", title: `Experts of block ${experts.blocks[layer]}`, unit: chosen === null ? "the layer with the largest load, over time" : "over time",
      rows: Array.from({ length: experts.count }, (_, e) => String(e)), columns: x.length,
      edges: (wide) => Array.from(bounds, (value) => Math.max(-1e6, Math.min(1e6, at(value, wide)))), load: (e, m) => load(m, layer, e),
      columnLabels: (wide) => ticks(state.axis, ...view()).map((value) => [Math.min(at(value, wide), wide - 8), tick(state.axis, value)]),
      told: (e, m) => `expert ${e}, ${place(state.axis, x[m])}: ${times(load(m, layer, e))}`, pick: (e, m) => choose(m),
    }));
    $("loads-layers").querySelector("canvas").setAttribute("aria-label", said);
  }

  const build = () => {
    const heat = state.heats[state.focus], given = heat && heat.experts, before = experts, last = !before || moment === before.x.step.length - 1;
    whole.hidden = !given;
    if (!given) return;
    if (!whole.isConnected) $("layers").after(whole);
    const shown = before && before.x.step[moment];
    experts = { ...given, x: decodedGroup({ x: given.x }).x };
    loads = decoded(given.loads, Uint16Array);
    moment = last ? experts.x.step.length - 1 : nearest(experts.x.step, shown);
    draw();
  };
  state.on("heats theme axis focus", build);
  state.on("range", () => { if (!whole.hidden && experts) draw(); });
}

makeExperts();
