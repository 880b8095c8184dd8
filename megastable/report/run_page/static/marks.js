// Marks over the plots: incidents as lines with flags, checkpoints at the lower edge, changes of the rate at the upper one.

/** A uPlot plugin. full: with flags, checkpoints and their hints; else thin lines only. */
function marks(full) {
  const flags = el("div.flags");
  return {
    hooks: {
      init: (u) => { if (full) u.over.append(flags); },
      drawClear: (u) => shade(u),
      draw: (u) => {
        const panel = state.panels[state.focus];
        if (!panel) return;
        const { left, top, width, height } = u.bbox, pen = u.ctx, scale = uPlot.pxRatio;
        pen.save();
        pen.beginPath();
        pen.rect(left, top, width, height);
        pen.clip();
        for (const incident of panel.incidents) {
          const x = Math.round(u.valToPos(incident.x[state.axis], "x", true));
          if (x < left || x > left + width) continue;
          pen.strokeStyle = colour(incident.mood === "good" ? "mark" : "bad");
          pen.globalAlpha = full ? 0.9 : 0.55;
          pen.lineWidth = scale * (full ? 1.25 : 1);
          pen.setLineDash([3 * scale, 3 * scale]);
          pen.beginPath();
          pen.moveTo(x, top);
          pen.lineTo(x, top + height);
          pen.stroke();
        }
        pen.setLineDash([]);
        pen.globalAlpha = 1;
        if (full) checkpoints(u, panel, pen, scale);
        changedRates(u, panel, pen, scale);
        pen.restore();
        if (full) raise(u, panel, flags);
      },
    },
  };
}

/** From an incident's onset to the proof that it is over. */
function shade(u) {
  const panel = state.panels[state.focus];
  if (!panel) return;
  const { left, top, width, height } = u.bbox, pen = u.ctx;
  pen.save();
  pen.fillStyle = colour("mark");
  pen.globalAlpha = 0.1;
  for (const incident of panel.incidents) {
    const end = incident.until ? incident.until[state.axis] : Infinity;
    const a = Math.max(left, u.valToPos(incident.x[state.axis], "x", true));
    const b = Math.min(left + width, end === Infinity ? left + width : u.valToPos(end, "x", true));
    if (b > a) pen.fillRect(a, top, b - a, height);
  }
  pen.restore();
}

function checkpoints(u, panel, pen, scale) {
  const { left, top, width, height } = u.bbox;
  let last = -Infinity;
  for (const checkpoint of panel.checkpoints) {
    const x = u.valToPos(checkpoint.x[state.axis], "x", true);
    if (x < left || x > left + width || x - last < 3 * scale) continue;
    last = x;
    const state_ = { healthy: "good", suspect: "bad", rejected: "bad" }[checkpoint.state] || "soft";
    pen.fillStyle = colour(state_);
    pen.globalAlpha = checkpoint.there ? 1 : 0.4;
    pen.beginPath();
    pen.moveTo(x, top + height - 7 * scale);
    pen.lineTo(x + 4 * scale, top + height);
    pen.lineTo(x - 4 * scale, top + height);
    pen.fill();
  }
  pen.globalAlpha = 1;
}

/** Cuts and warm-ups of the learning rate, and resumes whose next update is another one. */
function changedRates(u, panel, pen, scale) {
  const { left, top, width } = u.bbox;
  pen.fillStyle = colour("warn");
  for (const change of panel.rates) {
    const x = u.valToPos(change.x[state.axis], "x", true);
    if (x < left || x > left + width) continue;
    pen.beginPath();
    pen.moveTo(x, top + 7 * scale);
    pen.lineTo(x + 4 * scale, top);
    pen.lineTo(x - 4 * scale, top);
    pen.fill();
  }
}

/** Buttons with the incidents' numbers; those that would cover each other share one. */
function raise(u, panel, flags) {
  const width = u.over.clientWidth, groups = [];
  for (const incident of panel.incidents) {
    const x = u.valToPos(incident.x[state.axis], "x");
    if (!(x >= -1 && x <= width + 1)) continue;
    groups.push({ x, incidents: [incident] });
  }
  groups.sort((a, b) => a.x - b.x);
  const shown = [];
  for (const group of groups) {
    const last = shown[shown.length - 1];
    if (last && group.x - last.x < 20) last.incidents.push(...group.incidents); else shown.push(group);
  }
  const key = shown.map((group) => `${group.x.toFixed(1)}:${group.incidents.map((i) => i.number + i.mood)}`).join();
  if (flags.dataset.key === key) return;
  flags.dataset.key = key;
  fill(flags, shown.map(({ x, incidents }) => {
    const first = incidents[0], open = incidents.some((incident) => incident.mood !== "good");
    const flag = el(`button.flag${open ? ".open" : ""}`, {
      type: "button", title: incidents.map((i) => `Incident ${i.number}: ${i.title}`).join("\n"),
      "aria-label": `Incident ${first.number}: ${first.title}`,
      onmousedown: (event) => event.stopPropagation(), ondblclick: (event) => event.stopPropagation(),
      onclick: (event) => { event.stopPropagation(); openIncident(first.number); },
    }, incidents.length > 1 ? `${first.number}+` : String(first.number));
    flag.style.left = `${x}px`;
    return flag;
  }));
}
