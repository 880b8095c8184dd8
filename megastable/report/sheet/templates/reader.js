// The row that is open: all its values, and its texts with their tokens coloured.

/** An element of the page; attributes never hold markup. */
function node(name, attributes = {}, parent = null) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent?.append(element);
  return element;
}

/** Text from outside, its escapes set apart. */
function put(parent, text) {
  text.split(ESCAPE).forEach((part, i) => {
    if (!part) return;
    if (i % 2) node("span", { class: "esc" }, parent).textContent = part;
    else parent.append(part);
  });
  return parent;
}

class Reader {
  constructor(element, rows, legend, { close, move }) {
    Object.assign(this, { element, rows, legend });
    const head = node("div", { class: "head" }, element);
    this.where = node("b", {}, head);
    const button = (text, name, act) => {
      const made = node("button", { type: "button", class: "plain", "aria-label": name, title: name }, head);
      made.textContent = text;
      made.onclick = act;
      return made;
    };
    this.previous = button("↑", "the row before", () => move(-1));
    this.next = button("↓", "the row after", () => move(1));
    this.close = button("×", "close", close);
    this.body = node("div", { class: "body", tabindex: 0 }, element);
  }

  show(row, place, shown, query) {
    this.element.hidden = false;
    this.where.textContent = place < 0 ? "a row that is not shown" : `row ${same.format(place + 1)} of ${same.format(shown)}`;
    this.previous.disabled = place <= 0;
    this.next.disabled = place < 0 || place + 1 >= shown;
    const wide = this.rows.columns.map((column) => column.wide);
    this.body.replaceChildren(this.values(row, (i) => !wide[i]));
    const texts = this.rows.passages(row);
    if (texts.some((passage) => passage.heat)) this.body.append(this.scale());
    if (!texts.length && this.rows.read(0)) put(node("p", { class: "note" }, this.body), "The text of this row is not on this page: it has those of the first rows.");
    for (const passage of texts) {
      put(node("h3", {}, this.body), passage.title);
      this.body.append(this.text(passage));
    }
    if (wide.includes(true)) this.body.append(this.values(row, (i) => wide[i]));
    this.body.scrollTop = 0;
    this.highlight(query);
  }

  hide() {
    this.element.hidden = true;
    this.body.replaceChildren();
  }

  values(row, chosen) {
    const list = node("dl", { class: "facts" });
    this.rows.columns.forEach((column, i) => {
      const text = chosen(i) && this.rows.text(i, row);
      if (!text) return;
      const name = put(node("dt", {}, list), column.title);
      if (column.help) name.title = bare(column.help);
      put(node("dd", {}, list), text);
    });
    return list;
  }

  scale() {
    const legend = node("p", { class: "legend note" });
    put(legend, `${this.legend}: low `);
    const ramp = node("span", { class: "ramp", "aria-hidden": "true" }, legend);
    for (let level = 1; level < 10; level++) node("i", { class: `h${level}` }, ramp);
    legend.append(" high");
    return legend;
  }

  text({ spans, heat, hints }) {
    const block = node("pre", { dir: "auto" });
    let run = "";
    const flush = () => { if (run) put(block, run); run = ""; };
    spans.forEach((span, i) => {
      const level = heat?.[i] ?? "0", hint = hints?.[i];
      if (level === "0" && !hint) { run += span; return; }
      flush();
      const token = put(node("span", { class: level === "0" ? "token" : `token h${level}` }, block), span);
      if (hint) token.title = bare(hint);
    });
    flush();
    return block;
  }

  /** The words of a search, wherever tokens end; nothing in a browser that cannot. */
  highlight(query) {
    if (!globalThis.CSS?.highlights) return;
    CSS.highlights.delete("found");
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return;
    const ranges = [];
    for (const block of this.body.querySelectorAll("pre")) {
      const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT), nodes = [];
      let whole = "";
      while (walker.nextNode()) { nodes.push([whole.length, walker.currentNode]); whole += walker.currentNode.data; }
      const lower = whole.toLowerCase();
      if (lower.length !== whole.length) continue; // a few letters grow: offsets would be wrong
      const spot = (offset) => { const [start, text] = nodes[nodes.findIndex(([begin, text]) => offset < begin + text.length)]; return [text, offset - start]; };
      for (const word of words)
        for (let at = lower.indexOf(word); at >= 0 && ranges.length < 500; at = lower.indexOf(word, at + word.length)) {
          const range = new Range();
          range.setStart(...spot(at));
          const [last, offset] = spot(at + word.length - 1);
          range.setEnd(last, offset + 1);
          ranges.push(range);
        }
    }
    if (!ranges.length) return;
    CSS.highlights.set("found", new Highlight(...ranges));
    const first = ranges.reduce((a, b) => (a.compareBoundaryPoints(Range.START_TO_START, b) <= 0 ? a : b));
    const [box, spot] = [this.body.getBoundingClientRect(), first.getBoundingClientRect()];
    if (spot.bottom > box.bottom) this.body.scrollTop += spot.top - box.top - box.height / 3;
  }
}
