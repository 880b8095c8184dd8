// Incidents: a list, and the dialog with one of them and its post-mortem.

function makeIncidents() {
  const list = el("ol.incidents"), note = el("p.note");
  const whole = section("incidents", "Incidents", "", note, list);
  onPanel("panels", (panel) => {
    const all = [...panel.incidents].reverse();
    fill(note, all.length ? "What went wrong, what was done about it, and what it cost. The newest first; a click opens the post-mortem."
      : "Nothing has gone wrong so far.");
    refill(list, [...all.slice(0, 40).map((incident) => el("li", { "data-key": incident.number }, el("button", { type: "button", onclick: () => openIncident(incident.number) },
      el(`span.flag${incident.mood === "good" ? "" : ".open"}`, {}, String(incident.number)),
      el("span.what", {}, el("b", {}, incident.title), el("span", {}, [incident.actions.join(" "), incident.back_to === null ? "" : ` Back to step ${commas(incident.back_to)}.`, incident.bad ? ` Bad samples: ${commas(incident.skipped)}.` : ""].join(""))),
      el("span.when", {}, el("small", {}, `step ${commas(incident.onset)}`), clock(incident.opened).slice(5)),
      el("span.cause", {}, el("small", {}, "cause"), incident.cause_word.replace("_", " ")),
      el("span.cost", {}, el("small", {}, "cost"), costOf(incident, panel)),
      el(`span.badge.${incident.mood}`, {}, incident.outcome)))), all.length > 40 ? el("li.note", {}, `${all.length - 40} older ones: in the plots, and in the journal below.`) : null]);
  });
  return whole;
}

/** Steps that were undone, and the time that the account of the run charges to it: restarts and steps done again count. */
function costOf(incident, panel) {
  const told = [], seconds = (panel.time && panel.time.charged[incident.number]) || incident.seconds;
  if (incident.steps_lost) told.push(plural(incident.steps_lost, "step"));
  if (seconds) told.push(span(seconds));
  return told.join(", ") || (incident.refused ? `${plural(incident.refused, "update")} refused` : "none");
}

const dialog = el("dialog", { onclick: (event) => { if (event.target === dialog) dialog.close(); } });

function openDialog(name, ...content) {
  const close = el("button.close", { type: "button", "aria-label": "close", title: "close (Escape)", onclick: () => dialog.close() }, "✕");
  dialog.className = name;
  fill(dialog, close, ...content);
  if (!dialog.open) dialog.showModal();
}

function openIncident(number_) {
  const panel = state.panels[state.focus];
  const incident = panel && panel.incidents.find((one) => one.number === number_);
  if (!incident) return;
  state.incident = number_;
  const at = panel.incidents.indexOf(incident), before = panel.incidents[at - 1], after = panel.incidents[at + 1];
  const page = incident.page ? source.incidentPage(state.focus, incident.page) : null;
  const facts = [
    ["at", `step ${commas(incident.onset)}${incident.step !== incident.onset ? `, acted on at ${commas(incident.step)}` : ""}, ${clock(incident.opened)} UTC`],
    ["noticed as", incident.verdict.replaceAll("_", " ")], ["class", incident.kind], ["cause", incident.cause],
    ["why", incident.reasons.join(" ")], ["done", incident.actions.join(" ")], ["back to", incident.back_to === null ? "" : `step ${commas(incident.back_to)}`],
    [incident.bad ? "bad positions" : "skipped positions", incident.positions.length ? `${ranges(incident.positions)} (${plural(incident.skipped, "sample")})` : ""],
    ["deferred", incident.deferred.length ? ranges(incident.deferred) : ""],
    ["loss", incident.loss_peak === null ? "" : `${number(incident.loss_before)} before, ${number(incident.loss_peak)} at its peak${incident.loss_after === null ? "" : `, ${number(incident.loss_after)} after`}`],
    ["cost", costOf(incident, panel)], ["outcome", `${incident.outcome}${incident.closed ? `, proven at ${clock(incident.closed)} UTC` : ""}`],
  ];
  const frame = page ? el("iframe", { title: `Post-mortem of incident ${incident.number}`, sandbox: page.src ? "allow-same-origin" : "", ...page }) : null;
  openDialog("incident",
    el("div.over", {}, el(`span.flag${incident.mood === "good" ? "" : ".open"}`, {}, String(incident.number)), `incident ${incident.number}`, el(`span.badge.${incident.mood}`, {}, incident.outcome), el("span.grow"),
      before ? el("button", { type: "button", title: "the one before (p)", onclick: () => openIncident(before.number) }, `← ${before.number}`) : null,
      after ? el("button", { type: "button", title: "the next (n)", onclick: () => openIncident(after.number) }, `${after.number} →`) : null,
      el("button", { type: "button", title: "the plots around it (z)", onclick: () => { dialog.close(); zoomTo(incident); } }, "zoom to it"),
      page && page.src ? el("a", { href: page.src, target: "_blank", rel: "noopener" }, "post-mortem in a tab") : null),
    el("h2", {}, incident.title),
    frame || el("div.facts", {}, factList(facts),
      el("h3", {}, "Timeline"), el("ul.timeline", {}, incident.timeline.map((line) => el("li", {}, el("small", {}, clock(line.time)), ` ${line.text}`))),
      el("p.note", {}, incident.page ? "Its post-mortem page is not in this file: it is too large." : "Its post-mortem page is not written yet: python -m megastable.report.postmortem RUN writes it.")));
}

/** The plots around an incident: a tenth of what it took on each side, 40 steps at least. */
function zoomTo(incident) {
  const from = incident.x[state.axis], plots = state.plots[state.focus];
  const until = incident.until ? incident.until[state.axis] : view()[1];
  let least = 40;
  if (plots && state.axis !== "step" && plots.accepted.x.step.length > 1) {
    const x = plots.accepted.x, n = x.step.length - 1;
    least = 40 * ((x[state.axis][n] - x[state.axis][0]) / (x.step[n] - x.step[0]));
  }
  const room = Math.max(least, Math.abs(until - from));
  zoom([Math.max(0, from - room), Math.max(from, until) + room]);
  $("loss").scrollIntoView({ block: "nearest" });
}

/** The next or the one before, from the one that was opened or zoomed to last. */
function stepIncident(by) {
  const panel = state.panels[state.focus];
  if (!panel || !panel.incidents.length) return;
  const at = panel.incidents.findIndex((one) => one.number === state.incident);
  const next = panel.incidents[at < 0 ? (by > 0 ? 0 : panel.incidents.length - 1) : Math.min(panel.incidents.length - 1, Math.max(0, at + by))];
  state.incident = next.number;
  if (dialog.open) openIncident(next.number); else zoomTo(next);
}
