// Puts the page together, and keeps its data new.

const page = $("page");
let busy = false, wanted = false, took = 0;

/** Everything of the shown runs, for the window that is looked at. */
async function load() {
  if (busy) { wanted = true; return; }
  busy = true;
  const began = performance.now(), failed = new Set();
  // What cannot be had is told, and the rest is drawn.
  const tried = async (ask) => { try { await ask(); } catch (error) { failed.add(String(error.message || error).slice(0, 200)); } };
  try {
    const axis = state.axis, range = state.range && padded(state.range), columns = Math.min(2000, Math.max(400, page.clientWidth || 1200));
    const runs = [...new Set([state.focus, ...state.shown])];
    await Promise.all([...runs.map((run) => tried(async () => {
      const plots = await source.plots(run, axis, range, columns);
      if (axis === state.axis || !source.live) state.plots[run] = plots;
    })), ...runs.map((run) => tried(async () => {
      if (state.panels[run] && source.live && state.panels[run].version === state.heads[run].version) return;
      const version = state.heads[run] ? state.heads[run].version : -1;
      state.panels[run] = { ...(await source.panel(run)), version };
    }))]);
    state.tell("plots");
    state.tell("panels");
    for (const [name, ask] of [["heats", source.heat], ["machines", source.machines]]) {
      await tried(async () => {
        const run = state.focus, before = state[name][run];
        state[name][run] = await ask(run, axis, range);
        if (state[name][run] !== before) state.tell(name);
      });
    }
  } catch (error) {
    failed.add(String(error));
    console.warn(String(error));
  }
  const told = [...failed].join("; ");
  if (told !== state.failed) { state.failed = told; state.tell("failed"); }
  took = performance.now() - began;
  busy = false;
  if (wanted) { wanted = false; setTimeout(load, 0); }
}

/** A little more than is shown, so that a moved window has something to show at once. */
const padded = ([from, to]) => { const room = (to - from) * 0.5; return [from - room, to + room]; };

const reload = settled(load, 60);

function focusRun(run) {
  if (run === state.focus) return;
  state.focus = run;
  state.incident = undefined;
  state.shown.add(run);
  state.tell("focus");
  state.tell("plots");
  state.tell("panels");
  load();
}

function showRun(run) {
  if (state.shown.has(run) && state.shown.size > 1) state.shown.delete(run); else state.shown.add(run);
  if (!state.shown.has(state.focus)) state.focus = [...state.shown][0];
  state.tell("shown");
  state.tell("focus");
  load();
}

/** New heads: their data follow, but a run of millions of steps is not asked for all the time. */
let due = 0;
function heard(heads) {
  const cut = state.cut;
  state.cut = false;
  if (cut) state.tell("cut");
  state.heads = heads;
  state.tell("heads");
  // Not put off by the next heads, or a run whose steps come faster than its data would never be drawn again.
  due ||= setTimeout(() => { due = 0; load(); }, Math.max(0, Math.min(5000, 5 * took) - 100));
}

async function start() {
  recallTheme();
  recall();
  const charts = makeCharts();
  page.replaceChildren(makeBar(), makeHeadline(), section("loss", "Loss", "Line: applied steps. ✕: refused updates. Grey dots: undone steps. Dashed, with rings: validation. Grey band: the trend, for the eye. Flags: incidents, shaded until they are over. Triangles: checkpoints, green once proved healthy, pale once deleted; from above: the rate was cut or raised, a person changed a setting, or a resume changed the next update (see the journal).", charts.loss), makeIncidents(), makeTime(), ...charts.groups, makeHeat(), makeData(), makeCheckpoints(), makeRecipe(), makeMachines(), makeMachineMaps(), makeJournal(), dialog,
    el("footer", {}, "megastable · press ? for the keyboard"));
  const first = source.heads().then((heads) => {
    state.heads = heads;
    state.shown = new Set(heads.map((_, n) => n).slice(0, 8));
    state.tell("heads");
    if (heads.length > 1) return load();
    return null;
  });
  await Promise.all([first, load()]);
  state.on("range axis", reload);
  source.follow(heard, () => { state.cut = true; state.tell("cut"); });
  document.documentElement.dataset.ready = "true";
}

// What came with the page may be painted before. Not at the next frame: a page in the background has none.
setTimeout(start, 0);
