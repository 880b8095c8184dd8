// A histogram as a drawing. Bars are of equal width whatever their edges are, so that these may rise by factors.

const HEIGHT = 190, LEFT = 46, RIGHT = 10, BOTTOM = 24, LINE = 15;
const LOW = 200; // a bar so much lower than the highest cannot be seen: with many, heights are logarithms
const drawn = (name, attributes, parent) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent?.append(element);
  return element;
};
const short = (value) => (value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e6)
  ? value.toExponential(1).replace("e+", "e")
  : String(Number(value.toPrecision(Math.abs(value) >= 1000 ? 6 : 3))).replace(/\B(?=(\d{3})+$)/g, ","));
const brief = (value) => (value >= 1e9 ? `${value / 1e9}G` : value >= 1e6 ? `${value / 1e6}M` : value >= 1e3 ? `${value / 1e3}k` : String(value));

class Histogram {
  /** picked(first, last): bars were chosen, both ends included; null: none. */
  constructor(given, picked) {
    Object.assign(this, given);
    this.picked = picked;
    this.range = null;
    this.current = 0;
    const some = this.counts.filter((count) => count > 0), most = Math.max(...this.counts);
    this.log = some.filter((count) => count < most / LOW).length > some.length / 5;
    this.element = node("section", { class: "chart" });
    const head = node("div", { class: "head" }, this.element);
    put(node("h2", {}, head), this.title);
    this.scale = node("button", { type: "button", class: "plain", title: "heights of the bars as logarithms" }, head);
    this.scale.textContent = "log";
    this.scale.onclick = () => { this.log = !this.log; this.draw(); };
    this.place = node("div", { class: "plot" }, this.element);
    if (this.note || picked) {
      const note = node("p", { class: "note" }, this.element);
      put(note, this.note && `${this.note.replace(/[.]$/, "")}. `);
      if (picked) node("span", { class: "how" }, note).textContent = "Click a bar, or draw across some, to pick rows.";
    }
    new ResizeObserver(() => { if (this.width !== this.place.clientWidth) this.draw(); }).observe(this.place);
  }

  select(range) {
    this.range = range;
    for (const [i, bar] of this.bars?.entries() ?? []) this.paint(bar, i);
  }

  paint(bar, i) {
    const inside = this.range && i >= this.range[0] && i <= this.range[1];
    bar.classList.toggle("off", Boolean(this.range) && !inside);
    bar.setAttribute("aria-pressed", Boolean(inside));
  }

  label(i) {
    return `${short(this.edges[i])} to ${short(this.edges[i + 1])}`;
  }

  /** Where a value is, in bars from the left. */
  position(value) {
    const { edges } = this, last = edges.length - 1;
    if (value <= edges[0]) return 0;
    if (value >= edges[last]) return last;
    const i = edges.findIndex((edge) => edge > value) - 1;
    return i + (value - edges[i]) / (edges[i + 1] - edges[i]);
  }

  draw() {
    const focused = this.place.contains(document.activeElement);
    const width = (this.width = this.place.clientWidth);
    if (!width) return;
    this.scale.setAttribute("aria-pressed", this.log);
    const n = this.counts.length, step = (width - LEFT - RIGHT) / n;
    const marks = this.lines(step, width), top = 8 + LINE * (1 + Math.max(-1, ...marks.map((mark) => mark.line)));
    const bottom = HEIGHT - BOTTOM;
    const svg = drawn("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: this.picked ? "group" : "img" });
    svg.setAttribute("aria-label", bare(this.title));
    const { height, ticks } = this.heights(bottom - top);
    for (const tick of ticks) {
      const y = bottom - height(tick);
      drawn("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }, svg);
      drawn("text", { class: "tick", x: LEFT - 7, y: y + 4, "text-anchor": "end" }, svg).textContent = brief(tick);
    }
    this.bars = this.counts.map((count, i) => this.bar(svg, i, count, LEFT + i * step, step, top, bottom, height(count)));
    this.axis(svg, step, width, bottom);
    for (const { x, y, line, label, end } of marks) {
      drawn("line", { class: "mark", x1: x, x2: x, y1: 4 + line * LINE, y2: bottom }, svg);
      const text = drawn("text", { class: "mark", x: x + (end ? -5 : 5), y, "text-anchor": end ? "end" : "start" }, svg);
      text.textContent = label;
    }
    this.place.replaceChildren(svg);
    if (focused) this.bars[this.current].focus({ preventScroll: true });
  }

  heights(room) {
    const most = Math.max(1, ...this.counts);
    if (this.log) {
      const low = Math.log10(0.6), span = Math.log10(most) + 0.05 - low;
      const all = Array.from({ length: Math.floor(Math.log10(most)) + 1 }, (_, i) => 10 ** i);
      const every = Math.ceil(all.length / 5);
      return { height: (n) => (n > 0 ? ((Math.log10(n) - low) / span) * room : 0), ticks: all.filter((_, i) => i % every === 0) };
    }
    const rough = most / 4, power = 10 ** Math.floor(Math.log10(rough));
    const gap = Math.max(1, [1, 2, 5, 10].find((k) => k * power >= rough) * power);
    const ticks = Array.from({ length: Math.floor(most / gap) + 1 }, (_, i) => i * gap);
    return { height: (n) => (n / most) * room, ticks };
  }

  /** The marks, with a line of the margin for each label so that none covers another. */
  lines(step, width) {
    const ends = [];
    return this.marks.map(([value, label]) => [LEFT + this.position(value) * step, bare(label)])
      .sort((a, b) => a[0] - b[0]).map(([x, label]) => {
        const room = label.length * 6.7 + 10, end = x + room > width;
        const [from, to] = end ? [x - room, x] : [x, x + room];
        let line = ends.findIndex((taken) => taken.every(([a, b]) => to < a || from > b));
        if (line < 0) line = ends.push([]) - 1;
        ends[line].push([from, to]);
        return { x, label, end, line, y: 4 + line * LINE + 11 };
      });
  }

  bar(svg, i, count, x, step, top, bottom, height) {
    const bar = drawn("g", { class: this.picked ? "bin live" : "bin" }, svg);
    const gap = step > 5 ? 1 : 0;
    const tall = count ? Math.max(height, 1.5) : 0;
    drawn("rect", { class: "hit", x, y: top, width: step, height: bottom - top }, bar);
    drawn("rect", { class: "fill", x: x + gap / 2, y: bottom - tall, width: Math.max(step - gap, 0.5), height: tall, rx: Math.min(2, step / 4) }, bar);
    const title = drawn("title", {}, bar);
    title.textContent = `${this.label(i)}: ${same.format(count)}`;
    if (this.picked) this.listen(bar, i);
    return bar;
  }

  listen(bar, i) {
    bar.setAttribute("role", "button");
    bar.setAttribute("aria-label", `${this.label(i)}: ${same.format(this.counts[i])}`);
    bar.setAttribute("tabindex", i === this.current ? 0 : -1);
    this.paint(bar, i);
    const choose = (a, b) => {
      const range = [Math.min(a, b), Math.max(a, b)];
      const again = this.range && range[0] === this.range[0] && range[1] === this.range[1];
      this.select(again ? null : range);
      this.picked(this.range);
    };
    bar.addEventListener("pointerdown", (event) => { if (event.button === 0) { this.from = i; event.target.releasePointerCapture?.(event.pointerId); event.preventDefault(); } });
    bar.addEventListener("pointerup", () => { if (this.from !== undefined) choose(this.from, i); this.from = undefined; });
    bar.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Enter" || event.key === " ") choose(event.shiftKey && this.range ? this.range[0] : i, i);
      else if (move && this.bars[i + move]) {
        bar.setAttribute("tabindex", -1);
        this.current = i + move;
        this.bars[this.current].setAttribute("tabindex", 0);
        this.bars[this.current].focus();
      } else return;
      event.preventDefault();
    });
  }

  axis(svg, step, width, bottom) {
    drawn("line", { class: "base", x1: LEFT, x2: width - RIGHT, y1: bottom, y2: bottom }, svg);
    const n = this.counts.length, labels = this.edges.map(short);
    const room = Math.max(...labels.map((label) => label.length)) * 7 + 16;
    const every = [1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000].find((k) => k * step >= room) ?? n;
    for (let i = 0; i <= n; i += every) {
      const text = drawn("text", { class: "tick", x: LEFT + i * step, y: bottom + 16, "text-anchor": i === 0 ? "start" : i === n ? "end" : "middle" }, svg);
      text.textContent = labels[i];
    }
  }
}
