// The rows: what they hold, how a person reads it, and which of them are wanted.

const ESCAPE = /\ue000([^\ue001]*)\ue001/; // what `marked` of page.py sets apart
const same = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const collator = new Intl.Collator("en", { numeric: true });
const bare = (text) => text.replace(/[\ue000\ue001]/g, "");

/** A value as text; model.py says it in the same way. */
function told(value, kind) {
  if (value === null || value === undefined) return "";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Array.isArray(value)) return value.map((part) => told(part, kind)).join(", ");
  if (typeof value === "string" || kind === "text") return String(value);
  const size = Math.abs(value);
  if (kind === "share") {
    if (value > 0 && value < 0.001) return "<0.1%";
    return value > 0.999 && value < 1 ? ">99.9%" : `${(100 * value).toFixed(1)}%`;
  }
  const power = (text) => text.replace(/e([+-])(\d)$/, "e$10$2");
  if (size >= 1000 || kind === "count")
    return size < 1e15 || Number.isSafeInteger(value) ? same.format(Math.round(value) || 0) : power(value.toExponential(3));
  if (kind === "number" && size > 0 && size < 0.001) return power(value.toExponential(2));
  return value.toFixed(size >= 100 ? 1 : kind === "score" ? 2 : 3);
}

class Rows {
  /** read(n): the n-th part of the texts, by row; undefined where there is none. */
  constructor(data, read) {
    Object.assign(this, { columns: data.columns, count: data.rows, lines: data.plan, part: data.part, units: data.units, read });
    this.texts = [];
    this.parts = [];
  }

  passages(row) {
    const part = Math.floor(row / this.part);
    return (this.parts[part] ??= this.read(part) ?? {})[row] ?? [];
  }

  text(column, row) {
    return told(this.columns[column].values[row], this.columns[column].kind);
  }

  /** What a person counts: a sample of several documents has a row for each. */
  unit(row) {
    return this.units ? this.units.of[row] : row;
  }

  /** How many of them are in these rows, in words. */
  counted(rows) {
    const name = this.units?.name ?? "row", count = new Set(rows.map((row) => this.unit(row))).size;
    return `${same.format(count)} ${name}${count === 1 ? "" : "s"}`;
  }

  /** All text of a row in lower case: what a search looks through. */
  searched(row) {
    let text = this.texts[row];
    if (text === undefined) {
      const parts = this.columns.flatMap((column) =>
        column.kind === "text" ? [told(column.values[row], "text")] : []);
      for (const passage of this.passages(row)) parts.push(passage.title, passage.spans.join(""));
      text = this.texts[row] = bare(parts.join("\n")).toLowerCase();
    }
    return text;
  }

  /** The values of a column of text, the most frequent first; null where they are too many to choose from. */
  categories(column, most) {
    const found = new Map();
    for (const [row, value] of this.columns[column].values.entries())
      for (const part of new Set([].concat(value ?? []))) {
        const text = told(part, "text");
        found.set(text, (found.get(text) ?? new Set()).add(this.unit(row)));
        if (found.size > most) return null;
      }
    const counts = [...found].map(([text, units]) => [text, units.size]);
    return counts.sort((a, b) => b[1] - a[1] || collator.compare(a[0], b[0]));
  }

  /** Whether a row has all words, a picked value in every picked column, and a value in every range. */
  wanted({ query, picks, ranges }) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    return (row) =>
      [...picks].every(([column, values]) =>
        [].concat(this.columns[column].values[row] ?? []).some((part) => values.has(told(part, "text")))) &&
      ranges.every(({ column, low, high, open }) => {
        const value = this.columns[column].values[row];
        return typeof value === "number" && value >= low && (open || value < high);
      }) &&
      words.every((word) => this.searched(row).includes(word));
  }
}
