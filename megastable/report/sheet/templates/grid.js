// Tabulator's columns for the rows of a sheet: as wide as their text, and every value as text, never as markup.

const ELASTIC = 240; // the least width of the longest text, pixels

const numeric = (column) => column.kind !== "text";

function columnsOf(rows, shown, family) {
  const widths = rows.columns.map((column, i) => widest(rows, i, family));
  // Room that is left goes to the longest text.
  const elastic = widths.reduce((best, width, i) => (!numeric(rows.columns[i]) && (best < 0 || width > widths[best]) ? i : best), -1);
  return rows.columns.map((column, i) => ({
    field: String(i),
    titleFormatter: () => heading(column),
    formatter: (cell) => shown[i](cell.getElement(), cell.getValue()),
    sorter: comparing(column.kind),
    headerSortStartingDir: numeric(column) ? "desc" : "asc",
    cssClass: numeric(column) ? "n" : "",
    ...(i === elastic ? { minWidth: Math.min(widths[i], ELASTIC) } : { width: widths[i] }),
  }));
}

function widest(rows, i, family) {
  const pen = document.createElement("canvas").getContext("2d"), column = rows.columns[i];
  pen.font = `600 13px ${family}`;
  const title = pen.measureText(bare(column.title)).width + 12;
  pen.font = `14.4px ${family}`;
  const every = Math.max(1, Math.floor(rows.count / 400));
  let width = 0;
  for (let row = 0; row < rows.count; row += every) width = Math.max(width, pen.measureText(bare(rows.text(i, row)).slice(0, 120)).width);
  const most = numeric(column) ? 180 : 380;
  return Math.ceil(Math.max(title, Math.min(width * (every > 1 ? 1.06 : 1), most), column.kind === "score" ? 60 : 30)) + 26;
}

function heading(column) {
  const button = put(node("button", { type: "button" }), column.title);
  button.title = `${column.help ? `${bare(column.help)}\n` : ""}sort; with shift, by this too`;
  return button;
}

/** How a value of a column is shown: what it returns is what goes into the element, which gets its colour. */
function showing({ kind, tones, values }) {
  const highest = kind === "score" ? values.reduce((most, value) => (typeof value === "number" && value > most ? value : most), 0) : 0;
  return (element, value) => {
    const text = told(value, kind);
    if (kind === "text" && text.length > 24) element.title = bare(text);
    if (kind === "score" && typeof value === "number") {
      element.classList.add("score", ...(tones && value >= tones[0] ? [value >= tones[1] ? "bad" : "warn"] : []));
      if (highest > 0) element.style.setProperty("--part", `${100 * Math.sqrt(Math.min(1, Math.max(0, value / highest)))}%`);
    }
    return put(document.createDocumentFragment(), text);
  };
}

/** Rows as a table for paper, which has them all. */
function paper(rows, order, shown) {
  const table = node("table", { class: "paper" }), style = (column) => (numeric(column) ? { class: "n" } : {});
  const head = node("tr", {}, node("thead", {}, table)), body = node("tbody", {}, table);
  for (const column of rows.columns) put(node("th", style(column), head), column.title);
  for (const row of order) {
    const line = node("tr", {}, body);
    rows.columns.forEach((column, i) => {
      const cell = node("td", style(column), line);
      cell.append(shown[i](cell, column.values[row]));
    });
  }
  return table;
}

/** Of two values of a column, for Tabulator: equal ones stay as they were, those without a value come last. */
function comparing(kind) {
  const number = (value) => (typeof value === "string" ? { inf: Infinity, "-inf": -Infinity }[value] ?? Number(value || NaN) : Number(value ?? NaN));
  const key = kind === "text" ? (value) => told(value, kind) : number;
  const none = (key) => key === "" || Number.isNaN(key);
  return (a, b, rowA, rowB, column, direction) => {
    [a, b] = [key(a), key(b)];
    if (none(a) || none(b)) return (none(a) - none(b)) * (direction === "asc" ? 1 : -1);
    return kind === "text" ? collator.compare(a, b) : a < b ? -1 : a > b ? 1 : 0;
  };
}
