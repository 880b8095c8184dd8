// Builds elements. Text is always set as text, never as markup: what a run says is not trusted.

const $ = (id) => document.getElementById(id);

/** An element: el("button.flag", {title, onclick, "aria-label"}, children...). Children: elements, texts, null. */
function el(what, given = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [key, value] of Object.entries(given)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key in made && key !== "list") made[key] = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

function fill(parent, ...children) {
  parent.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return parent;
}

/** The same for lists that change while somebody points at them: what looks as before stays, with its focus and a click
 * that has begun. For children whose handlers depend on nothing but what they show. Of one with the data-key of before,
 * what is in its first element is replaced. */
function refill(parent, given) {
  const old = [...parent.childNodes], held = new Map(old.filter((one) => one.dataset.key).map((one) => [one.dataset.key, one]));
  const children = given.filter((child) => child !== null).map((made) => {
    const before = made.dataset.key && held.get(made.dataset.key);
    if (!before) return made;
    if (!before.isEqualNode(made)) before.firstElementChild.replaceChildren(...made.firstElementChild.childNodes);
    return before;
  });
  const most = Math.min(old.length, children.length);
  let before = 0, after = 0;
  while (before < most && old[before].isEqualNode(children[before])) before++;
  while (after < most - before && old[old.length - 1 - after].isEqualNode(children[children.length - 1 - after])) after++;
  const next = old[old.length - after] || null;
  for (const gone of old.slice(before, old.length - after)) gone.remove();
  for (const made of children.slice(before, children.length - after)) parent.insertBefore(made, next);
}

/** Names with their values, without those that have none. */
function factList(facts) {
  return el("dl.facts", {}, facts.filter(([, value]) => value).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

/** A section of the page: heading, what it shows in a sentence, content. */
function section(id, title, note, ...content) {
  return el("section", { id, "aria-label": title },
    el("div.title", {}, el("h2", {}, title), note ? el("p.note", {}, note) : null), ...content);
}

/** A row of buttons of which one is chosen. options: [value, label, hint]. */
function choice(label, options, chosen, choose) {
  const row = el("div.choice", { role: "group", "aria-label": label });
  const mark = (value) => {
    for (const button of row.children) button.setAttribute("aria-pressed", String(button.dataset.value === value));
  };
  for (const [value, text, hint] of options) {
    const button = el("button", { type: "button", title: hint || "", onclick: () => { choose(value); } }, text);
    button.dataset.value = value;
    row.append(button);
  }
  mark(chosen);
  row.mark = mark;
  return row;
}

/** A canvas that fills its parent's width at the screen's resolution; draw(context, width, height) in CSS pixels. */
function drawing(height, draw) {
  const canvas = el("canvas.drawing");
  canvas.style.height = `${height}px`;
  canvas.paint = () => {
    const width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
    if (!width) return;
    const high = canvas.clientHeight;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(high * scale);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    draw(context, width, high);
  };
  new ResizeObserver(() => canvas.paint()).observe(canvas);
  return canvas;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Calls `act` once a burst of calls is over. */
function settled(act, wait) {
  let timer = 0;
  return (...given) => { clearTimeout(timer); timer = setTimeout(() => act(...given), wait); };
}
