// The keyboard, and its help.

const KEYS = [
  ["drag", "", "zoom all plots to what is dragged over"],
  ["Escape", "double click", "show all again"],
  ["+", "-", "zoom in, out"],
  ["←", "→", "move the window"],
  ["a", "", "x axis: steps, tokens, time"],
  ["l", "", "logarithmic y axes"],
  ["n", "p", "next incident, the one before"],
  ["Enter", "", "open the post-mortem of the incident that was zoomed to"],
  ["r", "", "next run"],
  ["/", "", "search the journal"],
  ["d", "", "dark or light"],
  ["?", "", "this help"],
];
const LEGEND = [
  ["line", "steps whose update was applied and never undone; its shade goes from the lowest to the highest where several steps share a pixel"],
  ["✕", "an update that was refused: it never reached the weights"],
  ["grey dots", "steps that were undone, by a rewind or a restart"],
  ["dashed, with rings", "validation loss"],
  ["band", "where the loss is expected: a line through the last 64 accepted steps ± 4 robust standard deviations"],
  ["numbered flag", "an incident; shaded until it is proven to be over"],
  ["triangle", "a checkpoint: green once it has proved healthy, red if it is suspect, faint if it was deleted"],
];

function openHelp() {
  openDialog("help", el("h2", {}, "Keyboard"), el("dl.keys", {}, KEYS.map(([key, other, what]) => [el("dt", {}, el("kbd", {}, key), other ? [" ", el("kbd", {}, other)] : null), el("dd", {}, what)])),
    el("h2", {}, "In the plots"), el("dl.keys", {}, LEGEND.map(([what, told]) => [el("dt", {}, what), el("dd", {}, told)])));
}

const ACTS = {
  Escape: () => zoom(null), "+": () => move(0.5, 0), "=": () => move(0.5, 0), "-": () => move(2, 0),
  ArrowLeft: () => move(1, -0.25), ArrowRight: () => move(1, 0.25),
  a: () => chooseAxis(AXES[(AXES.findIndex(([name]) => name === state.axis) + 1) % AXES.length][0]),
  l: () => { state.log = !state.log; state.tell("log"); },
  n: () => stepIncident(1), p: () => stepIncident(-1), Enter: () => openIncident(state.incident),
  r: () => focusRun((state.focus + 1) % state.heads.length),
  "/": () => $("search").focus(), d: () => chooseTheme(isDark() ? "light" : "dark"), "?": openHelp,
};

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const at = event.target instanceof Element ? event.target : document.body;
  const typing = at.matches("input, textarea, select");
  if (typing && at.type !== "checkbox") {
    if (event.key === "Escape") at.blur();
    return;
  }
  if (dialog.open && !["n", "p"].includes(event.key)) return;
  if (event.key === "Enter" && at.matches("button, a")) return;
  const act = ACTS[event.key];
  if (act) { event.preventDefault(); act(); }
});
