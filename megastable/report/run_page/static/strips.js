// Strips: where the time went, and what of the data is skipped.

const KINDS = {
  training: ["training", "good"], redone: ["done again", "run1"], refused: ["refused", "warn"], stalled: ["stalled", "run6"],
  between_steps: ["between steps", "line2"], checkpointing: ["checkpointing", "run5"], evaluation: ["evaluation", "run0"],
  recovery: ["recovery", "run3"], start_up: ["start-up", "run7"], hang: ["hang", "bad"], ending: ["ending", "run4"],
  pause: ["pause", "soft"], waiting_for_hosts: ["waiting for hosts", "run1"], not_running: ["not running", "line"],
  unknown: ["unknown", "ink"],
};

function makeTime() {
  const told = el("span.values"), legend = el("div.legend"), table = el("tbody"), note = el("p.note");
  let time = null;
  const strip = drawing(34, (pen, width) => {
    if (!time) return;
    const at = (v) => ((v - time.begin) / (time.end - time.begin || 1)) * width;
    pen.fillStyle = colour("good"); pen.globalAlpha = 0.85; pen.fillRect(0, 0, width, 34); pen.globalAlpha = 1;
    for (const [kind, begin, end] of time.spans) {
      pen.fillStyle = colour((KINDS[kind] || KINDS.unknown)[1]);
      pen.fillRect(at(begin), 0, Math.max(1, at(end) - at(begin)), 34);
    }
  });
  strip.addEventListener("mousemove", (event) => {
    if (!time) return;
    const moment = time.begin + (event.offsetX / strip.clientWidth) * (time.end - time.begin);
    const slack = (time.end - time.begin) / strip.clientWidth;
    const found = time.spans.findLast(([, begin, end]) => begin - slack <= moment && moment <= end + slack);
    fill(told, `${span(moment)} after the start: `, found ? el("b", {}, `${(KINDS[found[0]] || [found[0]])[0]} for ${span(found[2] - found[1])}`) : el("b", {}, "training"),
      found ? [found[3] ? `, ${found[3]}` : "", found[4] ? `, incident ${found[4]}` : "", found[5] ? `, ${found[5]}` : ""].join("") : "");
  });
  strip.addEventListener("mouseleave", () => fill(told));
  const whole = section("time", "Where the time went", "", note, strip, el("div.told", {}, told), legend,
    el("div.scroll", {}, el("table", {}, el("thead", {}, el("tr", {}, ["cause", "kind", "incident", "host", "spans", "time"].map((t, n) => el(n > 3 ? "th.n" : "th", {}, t)))), table)));
  state.on("panels", () => {
    const panel = state.panels[state.focus];
    time = panel ? panel.time : null;
    whole.hidden = !time;
    if (!time) return;
    const wall = time.end - time.begin;
    fill(note, `Goodput: ${percent(time.share)} of ${span(wall)} was training (steps done for the first time, and applied).${time.lost.length ? " In the table: what is charged to a cause." : ""}`);
    fill(legend, Object.entries(time.seconds).sort((a, b) => b[1] - a[1]).map(([kind, seconds]) => {
      const [name, tone] = KINDS[kind] || [kind, "ink"], dot = el("i");
      dot.style.background = colour(tone);
      return el("span", {}, dot, `${name} ${percent(seconds / wall)} `, el("small", {}, span(seconds)));
    }));
    fill(table, time.lost.slice(0, 12).map((lost) => el("tr", {},
      el("td", {}, lost.cause || (KINDS[lost.kind] || [lost.kind])[0]), el("td", {}, (KINDS[lost.kind] || [lost.kind])[0]),
      el("td", {}, lost.incident === null ? "" : el("button.link", { type: "button", onclick: () => openIncident(lost.incident) }, `incident ${lost.incident}`)),
      el("td", {}, lost.host), el("td.n", {}, commas(lost.times)), el("td.n", {}, span(lost.seconds)))));
    table.closest(".scroll").hidden = !time.lost.length;
    strip.paint();
  });
  state.on("theme", () => { strip.paint(); state.tell("legend"); });
  return whole;
}

const FATES = { positions: ["skipped", "bad"], deferred: ["deferred", "warn"], returns: ["read later", "run0"] };

function makeData() {
  const rows = el("div.map"), note = el("p.note"), why = el("ul.why"), lines = el("tbody"), more = el("p.note");
  const table = el("div.scroll.low", {}, el("table", {}, el("thead", {}, el("tr", {},
    ["time, UTC", "step", "what", "documents", "samples", "incident", "reason"].map((t, n) => el([1, 4].includes(n) ? "th.n" : "th", {}, t)))), lines));
  const whole = section("data", "Skipped data", "", note, rows, el("div.told", {}, why), more, table);
  const build = () => {
    const panel = state.panels[state.focus];
    const data = panel && panel.data;
    whole.hidden = !data || (!data.corpora.length && !data.cursor);
    if (whole.hidden) return;
    const gone = data.swapped.length ? ` Swapped out: ${data.swapped.join(", ")}.` : "";
    fill(note, data.skipped || data.marks.length
      ? `${plural(data.skipped, "sample")} skipped for the rest of the run. Above: positions of the data order, in which samples are read; below: places in each corpus.${gone}`
      : `Nothing is skipped. Above: how far the data order was read; below: the corpora.${gone}`);
    fill(rows, orderStrip(data), data.corpora.map(corpusStrip));
    table.hidden = more.hidden = !data.lines.length;
    fill(more, `The skip ledger, skips.jsonl: ${data.count > data.lines.length ? `the newest ${commas(data.lines.length)} of ` : ""}${plural(data.count, "line")}.`);
    refill(lines, data.lines.map((line) => el("tr", {}, el("td.when", {}, line.time), el("td.n", {}, line.step === null ? "" : commas(line.step)),
      el("td", {}, line.what), el("td", {}, line.documents), el("td.n", {}, line.samples === null ? "" : commas(line.samples)),
      el("td", {}, line.incident === null ? "" : el("button.link", { type: "button", onclick: () => openIncident(line.incident) }, String(line.incident))), el("td", {}, line.reason))));
    fill(why, data.count <= data.lines.length ? [] : data.reasons.map(([reason, n]) => el("li", {}, el("b", {}, plural(n, "line")), ` ${reason}`)));
  };
  state.on("panels theme", build);
  return whole;
}

function labelled(name, more, strip, told) {
  return [el("div.name", { title: name }, el("b", {}, name), el("small", {}, more)), el("div.strip", {}, strip, told)];
}

function orderStrip(data) {
  const told = el("small.told"), end = Math.max(1, data.positions);
  const strip = drawing(26, (pen, width) => {
    pen.fillStyle = colour("code"); pen.fillRect(0, 0, width, 26);
    pen.fillStyle = colour("run0"); pen.globalAlpha = 0.25; pen.fillRect(0, 0, (data.cursor / end) * width, 26); pen.globalAlpha = 1;
    for (const [bin, share] of data.by_position) {
      pen.fillStyle = colour("bad"); pen.globalAlpha = 0.4 + 0.6 * share;
      pen.fillRect((bin / 600) * width, 0, Math.max(2, width / 600), 26);
    }
    pen.globalAlpha = 1;
    for (const { kind, ranges: some } of data.marks) {
      pen.fillStyle = colour(FATES[kind][1]);
      for (const [a, b] of some) pen.fillRect((a / end) * width, 3, Math.max(2, ((b - a) / end) * width), 20);
    }
  });
  const find = (event) => {
    const position = (event.offsetX / strip.clientWidth) * end, slack = (3 * end) / strip.clientWidth;
    return [position, data.marks.find((mark) => mark.ranges.some(([a, b]) => a - slack <= position && position <= b + slack))];
  };
  strip.addEventListener("mousemove", (event) => {
    const [position, mark] = find(event);
    strip.style.cursor = mark ? "pointer" : "";
    fill(told, mark ? `incident ${mark.incident}: ${FATES[mark.kind][0]} ${ranges(mark.ranges, 3)} (click opens it)` : `position ${commas(position)}`);
  });
  strip.addEventListener("mouseleave", () => fill(told));
  strip.addEventListener("click", (event) => { const [, mark] = find(event); if (mark) openIncident(mark.incident); });
  return labelled("data order", `read up to ${commas(data.cursor)}`, strip, told);
}

function corpusStrip(corpus) {
  const told = el("small.told");
  const strip = drawing(26, (pen, width) => {
    pen.fillStyle = colour("code"); pen.fillRect(0, 0, width, 26);
    for (const [bin, share] of corpus.bins) {
      pen.fillStyle = colour("bad"); pen.globalAlpha = 0.45 + 0.55 * Math.min(1, share);
      pen.fillRect((bin / 600) * width, 0, Math.max(2, width / 600), 26);
    }
    pen.globalAlpha = 1;
  });
  strip.addEventListener("mousemove", (event) => {
    const token = (event.offsetX / strip.clientWidth) * corpus.tokens, bin = Math.floor((event.offsetX / strip.clientWidth) * 600);
    const here = corpus.bins.find(([n]) => Math.abs(n - bin) <= 1);
    fill(told, `token ${short(token)}${here ? `: ${percent(here[1], 2)} of the samples here are skipped` : ""}`);
  });
  strip.addEventListener("mouseleave", () => fill(told));
  const gone = corpus.samples ? `${plural(corpus.samples, "sample")} skipped` : "nothing skipped";
  return labelled(corpus.name, `${short(corpus.tokens)} tokens, ${gone}`, strip, told);
}
