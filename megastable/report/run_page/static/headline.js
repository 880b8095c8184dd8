// The top of the page: how the run stands, in a sentence and twelve figures.

function makeHeadline() {
  const badge = el("span.badge"), sentence = el("h1"), figures = el("dl.figures"), fresh = el("span.fresh"), more = el("p.advice");
  const problems = el("ul.problems");
  const tellProblems = () => {
    const head = state.heads[state.focus], told = head ? [...head.problems] : [];
    // A server that cannot be reached is "not connected".
    if (state.failed && !state.cut) told.push(`A part of this page could not be loaded: ${state.failed}`);
    problems.hidden = !told.length;
    fill(problems, told.map((problem) => el("li", {}, problem)));
  };
  const build = () => {
    const head = state.heads[state.focus];
    if (!head) return;
    badge.className = `badge ${head.mood}`;
    fill(badge, head.word);
    fill(sentence, head.sentence);
    fill(figures, head.figures.map((figure) => el(`div.${figure.mood}`, {}, el("dt", {}, figure.name), el("dd", {}, figure.value, el("small", {}, figure.remark)))));
    fill(more, head.advice ? head.advice : "");
    more.hidden = !head.advice;
    tellProblems();
    document.title = `${head.word}: ${head.name}`;
    age();
  };
  let told = Date.now();
  const age = () => {
    const head = state.heads[state.focus];
    if (!head) return;
    if (!source.live) { fill(fresh, head.running || head.age === null ? `as of ${clock(head.now)} UTC` : `last sign of life ${clock(head.now - head.age)} UTC`); return; }
    if (state.cut) { fill(fresh, "not connected"); fresh.className = "fresh bad"; return; }
    fresh.className = `fresh${head.running ? " on" : ""}`;
    const seconds = head.age === null ? null : head.age + (Date.now() - told) / 1000;
    fill(fresh, head.running ? "live" : head.state, seconds === null ? "" : `, last sign of life ${span(Math.round(seconds))} ago`);
  };
  state.on("heads focus", () => { told = Date.now(); build(); });
  state.on("cut", age);
  state.on("cut failed", tellProblems);
  if (source.live) setInterval(age, 1000);
  return el("header.headline", {}, el("div.over", {}, badge, fresh), sentence, problems, figures, more);
}

/** The bar that stays at the top: runs, axis, window, theme, help. */
function makeBar() {
  const runs = el("div.runs"), window_ = el("span.window");
  const axis = choice("x axis", AXES, state.axis, chooseAxis);
  const log = el("button", { type: "button", title: "logarithmic y axes of losses and norms (l)", onclick: () => { state.log = !state.log; state.tell("log"); } }, "log");
  const reset = el("button", { type: "button", title: "show all (Escape or double click)", onclick: () => zoom(null) }, "show all");
  const build = () => {
    refill(runs, state.heads.map((head, n) => {
      const dot = el("i");
      dot.style.background = runColour(n);
      const box = state.heads.length > 1 ? el("input", { type: "checkbox", title: `draw ${head.name}`, "aria-label": `draw ${head.name}`, onchange: () => showRun(n) }) : null;
      return el(`span.run${n === state.focus ? ".focus" : ""}`, {}, box, state.heads.length > 1 ? dot : null,
        el("button.name", { type: "button", title: head.sentence, "aria-pressed": String(n === state.focus), onclick: () => focusRun(n) }, head.name));
    }));
    runs.querySelectorAll("input").forEach((box, n) => { box.checked = state.shown.has(n); });
  };
  const tellWindow = () => {
    const [from, to] = view();
    reset.disabled = !state.range;
    fill(window_, state.range ? `${tick(state.axis, round3(from))} to ${tick(state.axis, round3(to))}` : "");
    axis.mark(state.axis);
    log.setAttribute("aria-pressed", String(state.log));
  };
  state.on("heads focus shown theme", build);
  state.on("range axis log plots", tellWindow);
  const theme = el("button", { type: "button", title: "light or dark (d)", "aria-label": "light or dark", onclick: () => chooseTheme(isDark() ? "light" : "dark") }, "◐");
  const help = el("button", { type: "button", title: "keyboard and legend (?)", "aria-label": "help", onclick: openHelp }, "?");
  return el("nav.bar", {}, el("span.brand", {}, "megastable"), runs, el("span.grow"), window_, reset, axis, log, theme, help);
}

const round3 = (value) => Number(value.toPrecision(4));
