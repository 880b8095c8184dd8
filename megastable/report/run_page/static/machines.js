// Machines: own work of ranks and readings of GPUs as heat maps over the axis of the plots; the hosts in a table.

const HOSTS = 60;

/** Lowest and highest of a host's GPUs. */
function gpuRange(host, key, unit, show = (v) => number(v, 3)) {
  const range = host.range[key];
  if (!range) return "";
  return `${range[0] === range[1] ? show(range[0]) : `${show(range[0])} to ${show(range[1])}`}${unit}`;
}

function makeMachineMaps() {
  const box = el("div.plots"), note = el("p.note"), table = el("tbody");
  const list = el("div.scroll.low", {}, el("table", {}, el("thead", {}, el("tr", {},
    ["host", "free memory", "load", "GPUs", "utilization", "memory", "temperature", "power", "clock", "to look at"].map((t) => el("th", {}, t)))), table));
  const whole = section("hosts", "Ranks, GPUs and hosts", "", note, box, list);
  let drawn = [];
  const build = () => {
    const found = state.machines[state.focus];
    whole.hidden = !found || (!found.maps.length && !found.hosts.length);
    if (whole.hidden) return;
    fill(note, `Read twice a minute by the supervisor, last at ${clock(found.time)} UTC. Own work of a rank is a step without waits for others; a slow rank stands out.`);
    drawn = found.maps.map((one) => heatMap(one, { layers: one.rows, looks: found.looks, x: found.x }));
    fill(box, drawn.map((one) => one.figure));
    refill(table, found.hosts.slice(0, HOSTS).map((host) => el("tr", {},
      el("td", {}, host.name, host.ranks.length ? el("small", {}, ` rank${host.ranks.length > 1 ? "s" : ""} ${host.ranks[0]}${host.ranks.length > 1 ? `–${host.ranks[host.ranks.length - 1]}` : ""}`) : null),
      el("td", {}, `${number(host.memory_free, 3)} of ${number(host.memory, 3)} GiB`), el("td", {}, number(host.load, 3)),
      el("td", {}, host.gpus ? commas(host.gpus) : "none read"), el("td", {}, gpuRange(host, "utilization", "", (v) => percent(v, 0))), el("td", {}, gpuRange(host, "memory_used", " GiB")),
      el("td", {}, gpuRange(host, "temperature", " °C")), el("td", {}, gpuRange(host, "power", " W")), el("td", {}, gpuRange(host, "clock", " MHz")),
      el("td", {}, host.trouble.join("; "), host.unread.length ? el("small", {}, ` not readable: ${host.unread.join(", ")}`) : null))));
    list.hidden = !found.hosts.length;
  };
  const paint = () => drawn.forEach((one) => one.canvas.paint());
  state.on("machines theme axis focus", build);
  state.on("range panels", paint);
  return whole;
}
