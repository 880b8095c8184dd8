// The page: Tabulator shows the rows; what a person asks of them is kept in the address.

const find = (id) => document.getElementById(id);
const CHIPS = 8, CHOICES = 60; // values of a column that are chips, or else a list
const ROW = 34; // height of a row, pixels
const AHEAD = 8; // rows drawn beyond those in sight
const FEW = 16; // rows that need no box to scroll in
const PRINTED = 2000; // rows on paper
const DIGITS = /^\d+$/;

// Tabulator sets markup; whatever reaches it, none of it is an element.
globalThis.trustedTypes?.createPolicy("default", { createHTML: (text) => text.replaceAll("<", "&lt;") });

class Page {
  constructor(rows, histograms, legend) {
    Object.assign(this, { rows, histograms });
    this.lines = []; // Tabulator's rows in the order in which they are shown, and their numbers
    this.order = [];
    this.active = 0;
    this.grid = find("grid");
    this.reader = new Reader(find("reader"), rows, legend, { close: () => this.open(null), move: (by) => this.move(by) });
    this.chips = [];
    this.shown = rows.columns.map(showing);
    find("rows").classList.toggle("few", rows.count <= FEW);
    this.pickers();
    this.listen();
    this.take(this.asked());
    this.table = this.built();
  }

  built() {
    const { rows, grid } = this;
    const table = new Tabulator(grid, {
      data: Array.from({ length: rows.count }, (_, id) => Object.assign({ id }, rows.columns.map(({ values }) => values[id]))),
      columns: columnsOf(rows, this.shown, getComputedStyle(grid).fontFamily),
      columnDefaults: { headerSortTristate: true, resizable: "header" },
      layout: "fitColumns", rowHeight: ROW, renderVerticalBuffer: AHEAD * ROW, headerSortElement: "", placeholder: "No row is like that.",
      initialSort: this.sorts, initialFilter: [{ field: ({ id }) => this.wanted(id) }],
      rowFormatter: (row) => this.born(row),
    });
    table.on("rowClick", (event, row) => {
      if (String(getSelection())) return;
      const { id } = row.getData();
      this.active = this.order.indexOf(id);
      this.open(this.state.open === id ? null : id);
    });
    table.on("dataSorted", (sorters, lines) => {
      this.lines = lines;
      this.order = lines.map((line) => line.getData().id);
      this.fresh = true;
    });
    table.on("renderComplete", () => { if (this.fresh) this.changed(); });
    table.on("scrollVertical", () => this.even(table.rowManager.renderer));
    table.on("tableBuilt", () => {
      const box = grid.querySelector(".tabulator-tableholder");
      // The grid has the focus, and not the box in it that scrolls: it names the row that is active.
      grid.tabIndex = 0;
      box.tabIndex = -1;
      grid.setAttribute("aria-colcount", rows.columns.length);
    });
    return table;
  }

  pickers() {
    this.rows.columns.forEach((column, i) => {
      if (numeric(column) && !column.values.some((value) => typeof value === "boolean")) return;
      const values = this.rows.categories(i, CHOICES);
      // Where every row has its own there is nothing to choose.
      if (!values || values.length < 2 || values.length > this.rows.count / 2 || values.some(([text]) => text.length > 60)) return;
      const group = node("div", { class: "pick", role: "group", "aria-label": bare(column.title) }, find("picks"));
      put(node("span", {}, group), column.title);
      if (values.length <= CHIPS) this.chipsOf(group, i, values);
      else this.listOf(group, i, values);
    });
  }

  chipsOf(group, i, values) {
    for (const [text, count] of values) {
      const chip = node("button", { type: "button", class: "chip" }, group);
      put(chip, text || "none");
      node("small", {}, chip).textContent = same.format(count);
      chip.onclick = () => {
        const picked = new Set(this.state.picks.get(i));
        if (!picked.delete(text)) picked.add(text);
        this.pick(i, picked);
      };
      this.chips.push(() => chip.setAttribute("aria-pressed", Boolean(this.state.picks.get(i)?.has(text))));
    }
  }

  listOf(group, i, values) {
    const list = node("select", { "aria-label": bare(this.rows.columns[i].title) }, group);
    node("option", { value: "" }, list).textContent = "all";
    values.forEach(([text, count], at) => (node("option", { value: at }, list).textContent = `${bare(text)} (${same.format(count)})`));
    list.onchange = () => this.pick(i, new Set(list.value === "" ? [] : [values[list.value][0]]));
    this.chips.push(() => {
      const picked = this.state.picks.get(i), at = values.findIndex(([text]) => picked?.has(text));
      list.value = at < 0 ? "" : at;
    });
  }

  listen() {
    let waiting = 0;
    find("search").addEventListener("input", (event) => {
      clearTimeout(waiting);
      waiting = setTimeout(() => { this.state.query = event.target.value; this.apply(); }, 150);
    });
    find("clear").onclick = () => this.restore(new URLSearchParams());
    this.grid.addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.state.open !== null) this.open(null);
      else if (event.key === "/" && !event.target.closest("input, select")) { find("search").focus(); event.preventDefault(); }
    });
    addEventListener("beforeprint", () => { this.grid.after(this.paper = paper(this.rows, this.order.slice(0, PRINTED), this.shown)); });
    addEventListener("afterprint", () => this.paper.remove());
    addEventListener("hashchange", () => { if (location.hash !== this.hash) this.restore(this.asked()); });
    if (this.rows.lines) {
      find("copy").hidden = false;
      find("copy").onclick = () => this.copy();
    }
  }

  // What a person does

  key(event) {
    if (event.target.closest("button")) return;
    const page = Math.max(1, Math.floor(this.grid.clientHeight / ROW) - 2);
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[event.key];
    if (by !== undefined) this.move(by);
    else if (event.key === "Enter" || event.key === " ") this.open(this.state.open === this.order[this.active] ? null : this.order[this.active]);
    else return;
    event.preventDefault();
  }

  move(by) {
    if (!this.order.length) return;
    this.active = Math.min(Math.max(this.active + by, 0), this.order.length - 1);
    this.lines[this.active].scrollTo("nearest", false);
    this.open(this.state.open === null ? null : this.order[this.active]);
  }

  pick(column, values) {
    if (values.size) this.state.picks.set(column, values);
    else this.state.picks.delete(column);
    this.apply();
  }

  open(row) {
    this.state.open = row ?? null;
    find("split").classList.toggle("open", this.state.open !== null);
    if (this.state.open === null) this.reader.hide();
    else this.reader.show(row, this.order.indexOf(row), this.order.length, this.state.query);
    for (const line of [this.marked, (this.marked = this.lines[this.active])]) if (line) this.mark(line);
    if (this.marked) this.grid.setAttribute("aria-activedescendant", `row-${this.order[this.active]}`);
    else this.grid.removeAttribute("aria-activedescendant");
    this.keep();
  }

  // The documents of the rows that are shown, each once; those that were found harmless have no line.
  planned() {
    return [...new Set(this.order.map((row) => this.rows.lines[row]).filter((line) => line !== null))];
  }

  async copy() {
    const lines = this.planned();
    const text = `${lines.join("\n")}\n`;
    let told = `${same.format(lines.length)} copied`;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = node("textarea", { class: "aside", "aria-hidden": "true" }, document.body);
      area.value = text;
      area.select();
      if (!document.execCommand("copy")) told = "the browser does not let it";
      area.remove();
    }
    find("copy").textContent = told;
    setTimeout(() => this.count(), 1800);
  }

  // What follows from it

  born(row) {
    const element = row.getElement();
    element.id = `row-${row.getData().id}`;
    row.watchPosition((position) => element.setAttribute("aria-rowindex", position + 1));
    this.mark(row);
  }

  /** After a jump Tabulator guesses how high the rows above and below are: the last one would be out of reach. */
  even(drawn) {
    drawn.vDomTopPad = drawn.vDomTop * ROW;
    drawn.vDomBottomPad = (this.lines.length - 1 - drawn.vDomBottom) * ROW;
    drawn.tableElement.style.paddingTop = `${drawn.vDomTopPad}px`;
    drawn.tableElement.style.paddingBottom = `${drawn.vDomBottomPad}px`;
  }

  mark(row) {
    const element = row.getElement(), { id } = row.getData();
    element.classList.toggle("active", id === this.order[this.active]);
    element.setAttribute("aria-selected", id === this.state.open);
  }

  apply() {
    this.select();
    this.table.refreshFilter();
  }

  select() {
    const ranges = this.histograms.flatMap(({ column, edges, range, counts }) => range
      ? [{ column, low: range[0] ? edges[range[0]] : -Infinity, high: edges[range[1] + 1], open: range[1] + 1 === counts.length }] : []);
    this.wanted = this.rows.wanted({ ...this.state, ranges });
  }

  /** Other rows are shown, or in another order. */
  changed() {
    const { state, rows, order } = this;
    this.fresh = false;
    // What is read goes on with the rows that are shown, as far as there are any.
    if (state.open !== null && order.length && !order.includes(state.open)) state.open = order[0];
    this.active = Math.max(0, order.indexOf(state.open));
    this.lines[this.active]?.scrollTo("top");
    for (const chip of this.chips) chip();
    find("clear").hidden = order.length === rows.count;
    this.grid.setAttribute("aria-rowcount", order.length + 1);
    this.count();
    this.open(state.open);
  }

  count() {
    const [shown, all] = [same.format(this.order.length), same.format(this.rows.count)];
    const rows = shown === all ? `${all} row${all === "1" ? "" : "s"}` : `${shown} of ${all} rows`;
    find("shown").textContent = this.rows.units ? `${this.rows.counted(this.order)} in ${rows}` : rows;
    if (!this.rows.lines) return;
    const count = this.planned().length;
    find("copy").textContent = `copy ${same.format(count)} for a plan`;
    find("copy").disabled = !count;
    find("copy").title = "lines SHARD DOCUMENT, with FIRST:END for parts of documents: save them, then megastable prune plan CORPUS --list FILE";
  }

  // The address

  asked() {
    return new URLSearchParams(location.hash.slice(1));
  }

  keep() {
    const { query, picks, open } = this.state, words = new URLSearchParams();
    const key = (column) => this.rows.columns[column].key;
    if (query.trim()) words.set("search", query);
    for (const { field, dir } of this.table.getSorters().reverse()) words.append("sort", (dir === "desc" ? "-" : "") + key(field));
    for (const [column, values] of picks) for (const value of values) words.append(`is.${key(column)}`, value);
    this.histograms.forEach(({ range }, i) => { if (range) words.set(`bars.${i}`, range.join("-")); });
    if (open !== null) words.set("row", open);
    const text = String(words);
    this.hash = text && `#${text}`;
    if (location.hash === this.hash) return;
    try {
      history.replaceState(null, "", this.hash || location.pathname + location.search);
    } catch {
      // a browser that keeps the addresses of files as they are
    }
    this.hash = location.hash;
  }

  take(words) {
    const column = (key) => this.rows.columns.findIndex((column) => column.key === key);
    const sorted = (text) => (column(text) >= 0 ? { column: String(column(text)), dir: "asc" }
      : text[0] === "-" && column(text.slice(1)) >= 0 ? { column: String(column(text.slice(1))), dir: "desc" } : []);
    this.sorts = words.getAll("sort").flatMap(sorted).reverse(); // what Tabulator sorts by first stands last
    const picks = new Map();
    for (const [name, value] of words) {
      const at = name.startsWith("is.") ? column(name.slice(3)) : -1;
      if (at >= 0) picks.set(at, (picks.get(at) ?? new Set()).add(value));
    }
    this.histograms.forEach((histogram, i) => {
      const range = (words.get(`bars.${i}`) ?? "").split("-");
      const fits = range.length === 2 && range.every((bar) => DIGITS.test(bar) && Number(bar) < histogram.counts.length);
      histogram.select(fits && histogram.picked ? range.map(Number).sort((a, b) => a - b) : null);
    });
    const row = words.get("row") ?? "";
    this.state = {
      query: words.get("search") ?? "", picks,
      open: DIGITS.test(row) && Number(row) < this.rows.count ? Number(row) : null,
    };
    find("search").value = this.state.query;
    this.select();
  }

  restore(words) {
    this.take(words);
    this.table.blockRedraw();
    this.table.setSort(this.sorts);
    this.table.refreshFilter();
    this.table.restoreRedraw();
  }
}

const read = (id) => (find(id) ? JSON.parse(find(id).textContent) : undefined);
const data = read("data");
let page = null;
const histograms = data.histograms.map((given) =>
  new Histogram(given, given.column !== null && data.rows ? () => page.apply() : null));
// What is looked at first is the rows: more charts than a few are below them.
find("charts").append(...histograms.slice(0, data.first).map(({ element }) => element));
find("more")?.append(...histograms.slice(data.first).map(({ element }) => element));
addEventListener("pointerup", () => histograms.forEach((histogram) => setTimeout(() => (histogram.from = undefined))));
addEventListener("pointercancel", () => histograms.forEach((histogram) => (histogram.from = undefined)));
if (find("grid")) page = new Page(new Rows(data, (part) => read(`texts-${part}`)), histograms, data.legend);
