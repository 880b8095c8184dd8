// What is looked at: runs, axis, window, theme. Everything that draws listens to it.

const state = {
  heads: [],
  panels: [], // by run; null until it is there
  plots: [],
  heats: [],
  machines: [],
  shown: new Set([0]), // runs that are drawn
  focus: 0, // the run that everything but the lines is about
  axis: "step",
  range: null, // [from, to] of the axis; null = all
  log: false,
  failed: "", // what of the page could not be had
  listeners: [],
  on(what, act) { this.listeners.push([what.split(" "), act]); },
  tell(what) { for (const [names, act] of this.listeners) if (names.includes(what)) act(); },
};

/** Draw what is about the run in focus, whenever one of these changes and its panel is there. */
function onPanel(what, draw) {
  state.on(what, () => {
    const panel = state.panels[state.focus];
    if (panel) draw(panel);
  });
}

const AXES = [
  ["step", "step", "x axis: steps done (a)"],
  ["tokens", "tokens", "x axis: tokens of the data passed, skipped ones included (a)"],
  ["time", "time", "x axis: time since the run began (a)"],
];

/** The window that plots show: what was chosen, or all that the shown runs have. */
function view() {
  if (state.range) return state.range;
  let end = 0;
  for (const run of state.shown) {
    const plots = state.plots[run];
    if (!plots) continue;
    end = Math.max(end, plots.ends[state.axis]);
  }
  return [state.axis === "step" ? Math.min(1, end - 1) : 0, end || 1];
}

function zoom(range) {
  const old = state.range;
  if (range && !(range[1] > range[0])) return;
  state.range = range;
  if (old !== range) { remember(); state.tell("range"); }
}

/** Zoom by a factor around the middle, or move by a share of the width. */
function move(factor, share) {
  const [from, to] = view(), width = (to - from) * factor, middle = (from + to) / 2 + share * (to - from);
  zoom([middle - width / 2, middle + width / 2]);
}

function chooseAxis(axis) {
  if (axis === state.axis) return;
  // The same steps are shown: their places on the other axis.
  const plots = state.plots[state.focus], old = state.axis;
  let range = null;
  if (state.range && plots && plots.accepted.x[old].length) {
    range = state.range.map((value) => between(plots.accepted.x[old], plots.accepted.x[axis], value));
    if (!(range[1] > range[0])) range = null;
  }
  state.axis = axis;
  state.range = range;
  remember();
  state.tell("axis");
}

/** Interpolates y at `value` of ascending x. */
function between(x, y, value) {
  const i = below(x, value);
  if (i < 0) return y[0];
  if (i >= x.length - 1) return y[x.length - 1];
  return y[i] + ((value - x[i]) / (x[i + 1] - x[i])) * (y[i + 1] - y[i]);
}

/** The index of the last of ascending x that is not above `value`; -1 if none. */
function below(x, value) {
  let low = 0, high = x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function nearest(x, value) {
  const i = below(x, value);
  if (i < 0) return x.length ? 0 : -1;
  return i + 1 < x.length && x[i + 1] - value < value - x[i] ? i + 1 : i;
}

/** The view in the address: a link to it can be sent. */
function remember() {
  const told = new URLSearchParams();
  if (state.axis !== "step") told.set("axis", state.axis);
  if (state.range) { told.set("from", String(state.range[0])); told.set("to", String(state.range[1])); }
  history.replaceState(null, "", [...told].length ? `#${told}` : location.pathname + location.search);
}

function recall() {
  const told = new URLSearchParams(location.hash.slice(1)), axis = told.get("axis");
  if (AXES.some(([name]) => name === axis)) state.axis = axis;
  const range = [parseFloat(told.get("from")), parseFloat(told.get("to"))];
  if (range[1] > range[0]) state.range = range;
}

function chooseTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("megastable-theme", theme); } catch { /* a file may not keep anything */ }
  state.tell("theme");
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function recallTheme() {
  try {
    const theme = localStorage.getItem("megastable-theme");
    if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  } catch { /* as above */ }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state.tell("theme"));
}
