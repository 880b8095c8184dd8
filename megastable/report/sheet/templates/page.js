// The page: the table that shows only the rows in sight, and what a person asks of it, kept in the address.

const find = (id) => document.getElementById(id);
const CHIPS = 8, CHOICES = 60; // values of a column that are chips, or else a list
const AHEAD = 8; // rows drawn beyond those in sight
const ELASTIC = 240; // the least width of the longest text, pixels
const FEW = 16; // rows that need no box to scroll in
const PRINTED = 2000; // rows on paper
const DIGITS = /^\d+$/;

class Table {
  constructor(rows, histograms, legend) {
    Object.assign(this, { rows, histograms });
    this.state = { query: "", sort: null, picks: new Map(), open: null };
    this.order = [];
    this.active = 0;
    this.height = 34;
    this.paper = false;
    this.box = find("box");
    this.grid = find("grid");
    this.body = this.grid.tBodies[0];
    this.reader = new Reader(find("reader"), rows, legend, { close: () => this.open(null), move: (by) => this.move(by) });
    this.chips = [];
    this.header();
    this.pickers();
    this.listen();
    this.grid.setAttribute("aria-colcount", rows.columns.length);
    find("rows").classList.toggle("few", rows.count <= FEW);
  }

  // What stands still

  header() {
    const group = this.grid.querySelector("colgroup"), head = this.grid.tHead.rows[0];
    const widths = this.rows.columns.map((column, i) => this.widest(column, i));
    const numeric = (i) => this.rows.columns[i].kind !== "text";
    // Room that is left goes to the longest text.
    const elastic = widths.reduce((best, width, i) => (!numeric(i) && (best < 0 || width > widths[best]) ? i : best), -1);
    this.heads = this.rows.columns.map((column, i) => {
      const col = node("col", {}, group);
      if (i !== elastic) col.style.width = `${widths[i]}px`;
      const cell = node("th", { scope: "col", "aria-sort": "none", class: numeric(i) ? "n" : "" }, head);
      const button = node("button", { type: "button" }, cell);
      put(button, column.title);
      node("span", { class: "arrow", "aria-hidden": "true" }, button);
      button.title = `${column.help ? `${bare(column.help)}\n` : ""}sort`;
      button.onclick = () => this.sort(i);
      return cell;
    });
    const least = widths.map((width, i) => (i === elastic ? Math.min(width, ELASTIC) : width));
    this.grid.style.minWidth = `${least.reduce((sum, width) => sum + width, 0)}px`;
    const score = this.rows.columns.map((column) => column.kind === "score");
    this.highest = this.rows.columns.map(({ values }, i) =>
      score[i] ? values.reduce((most, value) => (typeof value === "number" && value > most ? value : most), 0) : 0);
  }

  widest(column, i) {
    const pen = (this.pen ??= document.createElement("canvas").getContext("2d"));
    const family = getComputedStyle(this.grid).fontFamily, every = Math.max(1, Math.floor(this.rows.count / 400));
    pen.font = `600 13px ${family}`;
    const title = pen.measureText(bare(column.title)).width + 12;
    pen.font = `14.4px ${family}`;
    let width = 0;
    for (let row = 0; row < this.rows.count; row += every) width = Math.max(width, pen.measureText(bare(this.rows.text(i, row)).slice(0, 120)).width);
    const most = column.kind === "text" ? 380 : 180;
    return Math.ceil(Math.max(title, Math.min(width * (every > 1 ? 1.06 : 1), most), column.kind === "score" ? 60 : 30)) + 26;
  }

  pickers() {
    this.rows.columns.forEach((column, i) => {
      if (column.kind !== "text" && !column.values.some((value) => typeof value === "boolean")) return;
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
    let asked = false, waiting = 0;
    const later = () => { if (!asked) requestAnimationFrame(() => { asked = false; this.draw(); }); asked = true; };
    this.box.addEventListener("scroll", later, { passive: true });
    new ResizeObserver(later).observe(this.box);
    find("search").addEventListener("input", (event) => {
      clearTimeout(waiting);
      waiting = setTimeout(() => { this.state.query = event.target.value; this.apply(); }, 150);
    });
    find("clear").onclick = () => this.restore(new URLSearchParams());
    this.body.addEventListener("click", (event) => {
      const place = event.target.closest("tr[data-place]")?.dataset.place;
      if (place === undefined || String(getSelection())) return;
      this.active = Number(place);
      const row = this.order[this.active];
      this.open(this.state.open === row ? null : row);
    });
    this.grid.addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.state.open !== null) this.open(null);
      else if (event.key === "/" && !event.target.closest("input, select")) { find("search").focus(); event.preventDefault(); }
    });
    addEventListener("hashchange", () => { if (location.hash !== this.hash) this.restore(this.asked()); });
    addEventListener("beforeprint", () => { this.paper = true; this.draw(); });
    addEventListener("afterprint", () => { this.paper = false; this.draw(); });
    if (this.rows.lines) {
      find("copy").hidden = false;
      find("copy").onclick = () => this.copy();
    }
  }

  // What a person does

  key(event) {
    if (event.target.closest("button")) return;
    const page = Math.max(1, Math.floor((this.box.clientHeight - this.top()) / this.height) - 1);
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[event.key];
    if (by !== undefined) this.move(by);
    else if (event.key === "Enter" || event.key === " ") this.open(this.state.open === this.order[this.active] ? null : this.order[this.active]);
    else return;
    event.preventDefault();
  }

  move(by) {
    if (!this.order.length) return;
    this.active = Math.min(Math.max(this.active + by, 0), this.order.length - 1);
    const top = this.active * this.height, room = this.box.clientHeight - this.top();
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + this.height > this.box.scrollTop + room) this.box.scrollTop = top + this.height - room;
    if (this.state.open !== null) this.open(this.order[this.active]);
    this.drawn = null;
    this.draw();
  }

  sort(column) {
    const { sort } = this.state, first = this.rows.columns[column].kind !== "text";
    if (sort?.column !== column) this.state.sort = { column, down: first };
    else this.state.sort = sort.down === first ? { column, down: !first } : null;
    this.apply();
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
    this.keep();
    this.drawn = null;
    this.draw();
  }

  // The documents of the rows that are shown, each once; those that were found innocent have no line.
  lines() {
    return [...new Set(this.order.map((row) => this.rows.lines[row]).filter((line) => line !== null))];
  }

  async copy() {
    const lines = this.lines();
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

  apply() {
    const { state, rows } = this;
    const ranges = this.histograms.flatMap(({ column, edges, range, counts }) => range
      ? [{ column, low: range[0] ? edges[range[0]] : -Infinity, high: edges[range[1] + 1], open: range[1] + 1 === counts.length }] : []);
    const found = rows.wanted({ query: state.query, picks: state.picks, ranges });
    this.order = state.sort ? rows.sorted(found, state.sort) : found;
    // What is read goes on with the rows that are shown, as far as there are any.
    if (state.open !== null && found.length && !found.includes(state.open)) state.open = this.order[0];
    this.active = Math.max(0, this.order.indexOf(state.open));
    this.heads.forEach((head, i) => head.setAttribute("aria-sort",
      state.sort?.column !== i ? "none" : state.sort.down ? "descending" : "ascending"));
    for (const chip of this.chips) chip();
    find("clear").hidden = found.length === rows.count;
    find("none").hidden = found.length > 0;
    this.grid.setAttribute("aria-rowcount", found.length + 1);
    this.box.scrollTop = this.active * this.height;
    this.count();
    this.open(state.open);
  }

  count() {
    const [shown, all] = [same.format(this.order.length), same.format(this.rows.count)];
    const rows = shown === all ? `${all} row${all === "1" ? "" : "s"}` : `${shown} of ${all} rows`;
    find("shown").textContent = this.rows.units ? `${this.rows.counted(this.order)} in ${rows}` : rows;
    if (!this.rows.lines) return;
    const count = this.lines().length;
    find("copy").textContent = `copy ${same.format(count)} for a plan`;
    find("copy").disabled = !count;
    find("copy").title = "lines SHARD DOCUMENT: save them, then python tools/prune_data.py plan CORPUS --list FILE";
  }

  top() {
    return this.grid.tHead.offsetHeight;
  }

  draw() {
    const count = this.order.length, all = this.paper;
    const first = all ? 0 : Math.max(0, Math.min(Math.floor(this.box.scrollTop / this.height), count - 1) - AHEAD);
    const last = Math.min(count, all ? PRINTED : first + Math.ceil(this.box.clientHeight / this.height) + 2 * AHEAD);
    const now = `${first} ${last} ${this.active} ${this.state.open} ${all}`;
    if (this.drawn === now) return;
    this.drawn = now;
    const part = document.createDocumentFragment();
    this.space(part, first);
    for (let place = first; place < last; place++) part.append(this.line(place));
    this.space(part, all ? 0 : count - last);
    this.body.replaceChildren(part);
    const tall = this.body.rows[1]?.getBoundingClientRect().height;
    if (!all && tall > 8 && Math.abs(tall - this.height) > 0.01) {
      this.height = tall; // as the browser's zoom and fonts have it
      this.drawn = null;
      this.draw();
    }
    if (count) this.grid.setAttribute("aria-activedescendant", `row-${this.active}`);
    else this.grid.removeAttribute("aria-activedescendant");
  }

  space(part, rows) {
    const line = node("tr", { class: "space", "aria-hidden": "true" }, part);
    node("td", { colspan: this.rows.columns.length }, line).style.height = `${rows * this.height}px`;
  }

  line(place) {
    const row = this.order[place], line = node("tr", { id: `row-${place}`, "data-place": place, "aria-rowindex": place + 2 });
    line.setAttribute("aria-selected", row === this.state.open);
    if (place === this.active) line.classList.add("active");
    this.rows.columns.forEach((column, i) => {
      const value = column.values[row], text = this.rows.text(i, row);
      const cell = put(node("td", {}, line), text);
      if (column.kind !== "text") cell.className = "n";
      else if (text.length > 24) cell.title = bare(text);
      if (column.kind === "score" && typeof value === "number") this.score(cell, value, column.tones, this.highest[i]);
    });
    return line;
  }

  score(cell, value, tones, highest) {
    cell.classList.add("score", ...(tones && value >= tones[0] ? [value >= tones[1] ? "bad" : "warn"] : []));
    if (highest > 0) cell.style.setProperty("--part", `${100 * Math.sqrt(Math.min(1, Math.max(0, value / highest)))}%`);
  }

  // The address

  asked() {
    return new URLSearchParams(location.hash.slice(1));
  }

  keep() {
    const { query, sort, picks, open } = this.state, words = new URLSearchParams();
    const key = (column) => this.rows.columns[column].key;
    if (query.trim()) words.set("search", query);
    if (sort) words.set("sort", (sort.down ? "-" : "") + key(sort.column));
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

  restore(words) {
    const column = (key) => this.rows.columns.findIndex((column) => column.key === key);
    const sort = words.get("sort") ?? "", by = [column(sort), column(sort.slice(1))];
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
      sort: by[0] >= 0 ? { column: by[0], down: false } : by[1] >= 0 && sort[0] === "-" ? { column: by[1], down: true } : null,
      open: DIGITS.test(row) && Number(row) < this.rows.count ? Number(row) : null,
    };
    find("search").value = this.state.query;
    this.apply();
  }
}

const read = (id) => (find(id) ? JSON.parse(find(id).textContent) : undefined);
const data = read("data");
let table = null;
const histograms = data.histograms.map((given) =>
  new Histogram(given, given.column !== null && data.rows ? () => table.apply() : null));
// What is looked at first is the rows: more charts than a few are below them.
find("charts").append(...histograms.slice(0, data.first).map(({ element }) => element));
find("more")?.append(...histograms.slice(data.first).map(({ element }) => element));
addEventListener("pointerup", () => histograms.forEach((histogram) => setTimeout(() => (histogram.from = undefined))));
addEventListener("pointercancel", () => histograms.forEach((histogram) => (histogram.from = undefined)));
if (find("grid")) {
  table = new Table(new Rows(data, (part) => read(`texts-${part}`)), histograms, data.legend);
  table.restore(table.asked());
}
