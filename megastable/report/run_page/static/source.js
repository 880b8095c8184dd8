// Where the page's data comes from: a server, or the file itself.

const embedded = $("data") ? JSON.parse($("data").textContent) : null;

/** Little-endian float64 or float32 in base64. */
function decoded(text, kind = Float32Array) {
  const raw = atob(text), bytesOf = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytesOf[i] = raw.charCodeAt(i);
  return new kind(bytesOf.buffer);
}

/** x by axis, and every series as {mean, low, high}. */
function decodedGroup(group) {
  const x = {}, series = {};
  for (const [axis, text] of Object.entries(group.x)) x[axis] = decoded(text, Float64Array);
  for (const [name, given] of Object.entries(group.series || {})) {
    if (typeof given === "string") {
      const mean = decoded(given);
      series[name] = { mean, low: null, high: null };
    } else {
      series[name] = { mean: decoded(given.mean), low: decoded(given.low), high: decoded(given.high) };
    }
  }
  return { x, series, count: group.count };
}

function decodedPlots(given) {
  const found = { ends: given.ends, rows: given.rows };
  for (const name of ["accepted", "refused", "undone", "sometimes"]) found[name] = decodedGroup(given[name]);
  const trend = given.accepted.trend;
  found.trend = trend ? { low: decoded(trend.low), high: decoded(trend.high) } : null;
  return found;
}

function decodedHeat(given) {
  const x = decodedGroup({ x: given.x }).x;
  return { ...given, x, kinds: given.kinds.map((kind) => ({ ...kind, values: decoded(kind.values) })) };
}

function decodedMachines(given) {
  const x = decodedGroup({ x: given.x }).x;
  return { ...given, x, maps: given.maps.map((one) => ({ ...one, values: decoded(one.values) })) };
}

const decodedCurve = (given) => ({ x: decodedGroup({ x: given.x }).x, loss: decoded(given.loss) });

function decodedCurves(given) {
  return { x: decodedGroup({ x: given.x }).x, values: given.values.map(({ name, y }) => ({ name, y: decoded(y) })) };
}

function decodedPanel(panel) {
  const probe = { standing: decodedCurve(panel.probe.standing), undone: decodedCurve(panel.probe.undone) };
  return { ...panel, evaluations: decodedCurve(panel.evaluations), probe, by_corpus: decodedCurves(panel.by_corpus), tasks: decodedCurves(panel.tasks) };
}

async function askedText(path, given = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(given)) if (value !== null && value !== undefined) query.set(key, value);
  const answer = await fetch(`${path}${[...query].length ? `?${query}` : ""}`, { credentials: "same-origin" });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.text();
}

const asked = async (path, given) => JSON.parse(await askedText(path, given));

/** The same object as long as the answer is the same: what it shows need not be made again under somebody's pointer. */
const answers = new Map();
async function askedAgain(path, given, decode) {
  const text = await askedText(path, given), before = answers.get(path);
  if (before && before.text === text) return before.value;
  const value = decode(JSON.parse(text));
  answers.set(path, { text, value });
  return value;
}

const windowOf = (axis, range) => ({ axis, from: range ? range[0] : null, to: range ? range[1] : null });

const serverSource = {
  live: true,
  heads: () => asked("heads"),
  panel: async (run) => decodedPanel(await asked(`run/${run}/panel`)),
  plots: async (run, axis, range, columns) =>
    decodedPlots(await asked(`run/${run}/plots`, { ...windowOf(axis, range), columns })),
  heat: (run, axis, range) => askedAgain(`run/${run}/heat`, windowOf(axis, range), decodedHeat),
  machines: (run, axis, range) => askedAgain(`run/${run}/machines`, windowOf(axis, range), decodedMachines),
  journal: (run, query, group, most) => asked(`run/${run}/journal`, { query, group, most }),
  incidentPage: (run, page) => ({ src: `run/${run}/incidents/${page}/report.html` }),
  follow(heard, lost) {
    // A browser keeps six connections to a server: pages that nobody looks at hold none of them.
    let events = null;
    const watch = () => {
      if (document.hidden === !events) return;
      if (document.hidden) { events.close(); events = null; return; }
      events = new EventSource("events");
      events.onmessage = (event) => heard(JSON.parse(event.data));
      events.onerror = () => lost();
    };
    document.addEventListener("visibilitychange", watch);
    watch();
  },
};

const fileSource = {
  live: false,
  kept: new Map(),
  once(key, make) {
    if (!this.kept.has(key)) this.kept.set(key, make());
    return this.kept.get(key);
  },
  heads: async () => embedded.runs.map((run) => run.head),
  panel: async (run) => fileSource.once(`panel${run}`, () => decodedPanel(embedded.runs[run].panel)),
  plots: async (run) => fileSource.once(`plots${run}`, () => decodedPlots(embedded.runs[run].plots)),
  heat: async (run) => fileSource.once(`heat${run}`, () => decodedHeat(embedded.runs[run].heat)),
  machines: async (run) => fileSource.once(`machines${run}`, () => decodedMachines(embedded.runs[run].machines)),
  async journal(run, query, group, most) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean), journal = embedded.runs[run].panel.journal;
    const lines = journal.lines.filter((line) => (!group || line.group === group)
      && words.every((word) => `${line.text} ${line.name} step ${line.step}`.toLowerCase().includes(word)));
    return { ...journal, lines: lines.slice(0, most), count: lines.length };
  },
  incidentPage: (run, page) => (page in embedded.runs[run].pages ? { srcdoc: embedded.runs[run].pages[page] } : null),
  follow() {},
};

const source = embedded ? fileSource : serverSource;
