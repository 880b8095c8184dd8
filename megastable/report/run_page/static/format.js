// Numbers, time spans and places as text.

const commas = (n) => Math.round(n).toLocaleString("en-US");

/** Four digits; large and small ones with an exponent or a unit. */
function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e15 || (size < 1e-3 && size > 0)) return value.toExponential(digits - 2).replace("e+", "e");
  if (size >= 1e4) return short(value);
  return size >= 1000 ? commas(value) : String(Number(value.toPrecision(digits)));
}

function short(value) {
  for (const [unit, size] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  }
  return String(Number(value.toPrecision(3)));
}

function span(seconds) {
  const sign = seconds < 0 ? "-" : "", exact = Math.abs(seconds), s = exact < 59.5 ? exact : exact < 599.5 ? Math.round(exact) : 60 * Math.round(exact / 60);
  if (s < 60) return `${sign}${Number(s.toPrecision(s < 10 ? 2 : 3))} s`;
  if (s < 3600) return `${sign}${Math.floor(s / 60)} min${s % 60 >= 1 ? ` ${s % 60} s` : ""}`;
  const hours = Math.floor(s / 3600), minutes = Math.floor((s % 3600) / 60);
  if (hours < 48) return `${sign}${hours} h${minutes ? ` ${minutes} min` : ""}`;
  return `${sign}${Math.floor(hours / 24)} d${hours % 24 ? ` ${hours % 24} h` : ""}`;
}

const clock = (time) => (time ? new Date(time * 1000).toISOString().replace("T", " ").slice(0, 19) : "");
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const bytes = (n) => (n === null ? "" : n >= 1e9 ? `${Number((n / 1e9).toPrecision(3))} GB` : `${Number((n / 1e6).toPrecision(3))} MB`);
const plural = (n, noun) => `${commas(n)} ${noun}${n === 1 ? "" : "s"}`;

/** Half-open ranges, with both ends included. */
function ranges(given, most = 6) {
  const shown = given.slice(0, most).map(([a, b]) => (b === a + 1 ? commas(a) : `${commas(a)}–${commas(b - 1)}`)).join(", ");
  return given.length > most ? `${shown} and ${given.length - most} more` : shown;
}

/** A value of an axis. */
function place(axis, value) {
  if (axis === "time") return span(value);
  return axis === "tokens" ? `${short(value)} tokens` : `step ${commas(value)}`;
}

const INCREMENTS = {
  time: [1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 432000, 864000,
    1728000, 4320000, 8640000],
};

/** Round values of an axis, at most `most` of them. */
function ticks(axis, from, to, most = 5) {
  const least = (to - from) / most, unit = 10 ** Math.floor(Math.log10(least || 1));
  const step = axis === "time" ? INCREMENTS.time.find((one) => one >= least) || 8640000 : unit * [1, 2, 5, 10].find((one) => one * unit >= least);
  const found = [];
  for (let n = Math.ceil(from / step); n * step <= to; n++) found.push(n * step);
  return found;
}

/** The labels of an axis. */
function tick(axis, value) {
  if (axis === "time") {
    if (value === 0) return "0";
    if (value < 60) return `${value} s`;
    if (value < 3600) return `${Number((value / 60).toFixed(1))} min`;
    return value < 172800 ? `${Number((value / 3600).toFixed(2))} h` : `${Number((value / 86400).toFixed(2))} d`;
  }
  return Math.abs(value) >= 10000 || axis === "tokens" ? short(value) : commas(value);
}
