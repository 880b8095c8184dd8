// Lists: checkpoints, machines, the journal.

function makeCheckpoints() {
  const table = el("tbody"), note = el("p.note");
  const whole = section("checkpoints", "Checkpoints", "", note, el("div.scroll.low", {}, el("table", {}, el("thead", {}, el("tr", {},
    ["checkpoint", "state", "step", "saved, UTC", "size", "took", "steps waited"].map((t, n) => el([2, 4, 5, 6].includes(n) ? "th.n" : "th", {}, t)))), table)));
  onPanel("panels", (panel) => {
    whole.hidden = !panel.checkpoints.length;
    const kept = panel.checkpoints.filter((one) => one.there), proved = kept.filter((one) => one.state === "healthy");
    const { newest, proved: best } = panel.usable;
    fill(note, `${plural(panel.checkpoints.length, "checkpoint")} saved, ${commas(kept.length)} on disk, ${commas(proved.length)} of these proved healthy: ${panel.usable.after ? `${plural(panel.usable.after, "later step")} in a row were` : "training went on from there"} on trend. `,
      newest === null ? "" : ["A start resumes from ", el("b", {}, `step ${commas(newest)}`), ", the newest, if its bytes are intact. ",
        best === null ? "None has proved healthy yet." : best === newest ? "It has proved healthy." : ["To export, or to branch off, take ", el("b", {}, `step ${commas(best)}`), ", the newest that proved healthy."]]);
    refill(table, [...panel.checkpoints].reverse().slice(0, 60).map((one) => el("tr", { title: one.why }, el("td", {}, one.name),
      el("td", {}, el(`span.badge.${{ healthy: "good", suspect: "bad", rejected: "bad" }[one.state] || "plain"}`, {}, one.state === "saved" ? "not proved yet" : one.state), one.there ? "" : " deleted since"),
      el("td.n", {}, commas(one.step)), el("td.when", {}, clock(one.time)), el("td.n", {}, bytes(one.bytes)),
      el("td.n", {}, one.seconds === null ? "" : span(one.seconds)), el("td.n", {}, one.blocked === null ? "" : span(one.blocked)))));
  });
  return whole;
}

function makeRecipe() {
  const box = el("div");
  const whole = section("recipe", "What is trained", "", box);
  onPanel("panels", (panel) => {
    whole.hidden = !panel.recipe.length;
    const peaks = panel.peaks.filter((one, n) => !n || one.tflops !== panel.peaks[n - 1].tflops);
    const facts = [...panel.recipe, ...(peaks.length > 1 ? [["peak of MFU", peaks.map((one) => `${number(one.tflops, 3)} TFLOP/s from step ${commas(one.step)} on`).join(", ")]] : [])];
    fill(box, factList(facts));
  });
  return whole;
}

function makeMachines() {
  const box = el("div");
  const whole = section("machines", "Processes and machines", "", box);
  onPanel("panels heads", (panel) => {
    const m = panel.machines, alive = (one) => (one.alive === null ? "cannot be told" : one.alive ? `alive${one.pid ? `, process ${one.pid}` : ""}${one.host ? ` on ${one.host}` : ""}` : "not running");
    const restarts = Object.entries(m.restarts).map(([how, n]) => `${n} after ${how.replace("_", " ")}`).join(", ");
    const facts = [["training process", alive(m.trainer)], ["supervisor", alive(m.supervisor)], ["phase", m.trainer.alive ? m.phase : ""],
      ["ranks", m.world === null ? "" : commas(m.world)], ["hosts", m.hosts.join(", ")], ["starts", `${commas(m.starts)}${restarts ? `; restarts: ${restarts}` : ""}`],
      ...Object.entries(m.slow).map(([host, told]) => [`slow: ${host}`, told]), ...Object.entries(m.left_out).map(([host, until]) => [`last choice: ${host}`, `until ${clock(until)} UTC`])];
    fill(box, factList(facts),
      m.attempts.length > 1 ? el("div.scroll.low", {}, el("table", {}, el("thead", {}, el("tr", {}, ["attempt", "began, UTC", "lasted", "hosts", "how it ended"].map((t) => el("th", {}, t)))),
        el("tbody", {}, [...m.attempts].reverse().map((one) => el("tr", {}, el("td", {}, String(one.number)), el("td.when", {}, clock(one.began)), el("td.when", {}, one.ended ? span(one.ended - one.began) : ""), el("td", {}, commas(one.hosts)), el("td", {}, one.how)))))) : null);
  });
  return whole;
}

const EVENT_GROUPS = [["", "all"], ["incident", "trouble"], ["checkpoint", "checkpoints"], ["data", "data"], ["people", "people"], ["process", "processes"], ["other", "other"]];
const MORE = 400;

function makeJournal() {
  let group = "", most = 100, asking = 0;
  const search = el("input", { type: "search", id: "search", placeholder: "search the journal  ( / )", "aria-label": "search the journal" });
  const list = el("ol.journal"), count = el("span.note"), more = el("button", { type: "button", onclick: () => { most += MORE; ask(); } }, "more");
  const groups = choice("kind of event", EVENT_GROUPS, group, (value) => { group = value; groups.mark(value); most = 100; ask(); });
  const ask = async () => {
    const mine = ++asking, run = state.focus;
    let found;
    try { found = await source.journal(run, search.value, group, most); } catch { return; }
    if (mine !== asking) return;
    fill(count, `${plural(found.count, "event")}${found.passed ? `; ${plural(found.passed, "older refused update")} only in the plots` : ""}`);
    more.hidden = found.count <= found.lines.length;
    refill(list, found.lines.map(journalLine));
  };
  search.addEventListener("input", settled(() => { most = 100; ask(); }, 150));
  state.on("panels focus", ask);
  return section("journal", "Journal", "", el("div.tools", {}, search, groups, count), list, more);
}

function journalLine(line) {
  const bad = line.group === "incident";
  return el(`li${bad ? ".trouble" : ""}`, {}, el("time", {}, clock(line.time)),
    line.step === null ? el("span.step") : el("button.step.link", { type: "button", title: "zoom to it", onclick: () => zoomToStep(line) }, commas(line.step)),
    el("span.event", {}, line.name.replaceAll("_", " ")),
    el("span.text", {}, line.text || "–", line.incident === null ? null : [" ", el("button.link", { type: "button", onclick: () => openIncident(line.incident) }, `open ${line.incident}`)]));
}

function zoomToStep(line) {
  const plots = state.plots[state.focus];
  if (!plots || !plots.accepted.x.step.length) return;
  const x = plots.accepted.x;
  const ends = [line.step - 50, line.step + 50].map((step) => (state.axis === "step" ? step : between(x.step, x[state.axis], step)));
  zoom([Math.max(0, ends[0]), ends[1]]);
  $("loss").scrollIntoView({ block: "nearest" });
}
