// Which plots there are.

const LOSS = {
  key: "loss", title: "Training loss", unit: "nats per token", full: true, height: 330, log: true, apart: "loss",
  help: "Mean loss of each step. Line: accepted steps; shade: lowest to highest where several steps share a pixel; band: "
    + "line through the last 64 accepted steps ± 4 robust standard deviations; ✕: refused updates; grey dots: steps that were "
    + "undone; dashed with rings: validation.",
  lines: [{ name: "loss", label: "loss", trend: true }],
  extra(run) {
    const panel = state.panels[run];
    if (!panel || !panel.evaluations.loss.length) return [];
    return [{ x: panel.evaluations.x[state.axis], y: panel.evaluations.loss, label: "validation" }];
  },
};

/** Curves that were measured now and then, one for each name; of the run in focus only. */
function curves(key) {
  return (run) => {
    const panel = state.panels[run];
    if (!panel || run !== state.focus) return [];
    return panel[key].values.map(({ name, y }, n) => ({ x: panel[key].x[state.axis], y, label: name, stroke: colour(`run${n % 8}`) }));
  };
}

/** The probe: what a rewind or a restart undid is apart, as of steps. */
function probe(run) {
  const panel = state.panels[run];
  if (!panel) return [];
  const { standing, undone } = panel.probe, on = state.axis;
  const line = { x: standing.x[on], y: standing.loss, label: "probe", kind: "line", sparse: true };
  return [...(undone.loss.length && run === state.focus ? [{ x: undone.x[on], y: undone.loss, label: "undone", kind: "undone", sparse: true }] : []), line];
}

const GROUPS = [
  ["evaluation", "Evaluation", [
    { key: "probe", title: "Probe", unit: "nats per token", log: true, lines: [], extra: probe,
      help: "Mean loss of a few validation samples, the same ones throughout and never trained on, at every snapshot and every 25 steps: it tells how the model does, whatever the batches hold. Grey dots: of weights that were undone." },
    { key: "by_corpus", title: "Validation loss by corpus", unit: "nats per token", log: true, help: "Of a blend of several corpora: each on its own samples, always the same ones.", lines: [], extra: curves("by_corpus") },
    { key: "tasks", title: "Tasks", unit: "score", help: "Scores of eval.command, such as lm-evaluation-harness, over the steps of the checkpoints.", lines: [], extra: curves("tasks") },
  ]],
  ["optimization", "Optimization", [
    { key: "grad_norm", title: "Gradient norm", help: "Before clipping. ✕: refused updates; grey dots: undone steps.", log: true, apart: "grad_norm", lines: [{ name: "grad_norm", label: "norm" }] },
    { key: "clipped", title: "Clipped updates", unit: "share of steps", share: true, zero: true, help: "Share of the last 50 accepted steps whose gradient was clipped, or of all steps of a pixel if these are more.", lines: [{ name: "clipped", label: "clipped", tone: "run1", area: true }] },
    { key: "lr", title: "Learning rate", zero: true, help: "As applied, with cuts and warm-ups after incidents.", lines: [{ name: "lr", label: "rate", tone: "run2" }] },
    { key: "noise_scale", title: "Gradient noise scale", unit: "samples", log: true, help: "The batch beyond which larger ones save few steps, estimated from the gradients of the data ranks and smoothed (arXiv:1812.06162); none with one data rank.", lines: [{ name: "noise_scale", label: "scale", tone: "run6" }] },
    { key: "update_ratio", title: "Update / weight", log: true, help: "Norm of the update over norm of the weights; 1e-3 is usual.", lines: [{ group: "sometimes", name: "update_ratio", label: "ratio", tone: "run4" }] },
    { key: "parameter_norm", title: "Parameter norm", help: "Of all weights together.", lines: [{ group: "sometimes", name: "parameter_norm", label: "norm", tone: "run3" }] },
    { key: "second_moment_norm", title: "Second-moment norm", log: true, help: "Norm of Adam's second moments.", lines: [{ group: "sometimes", name: "second_moment_norm", label: "norm", tone: "run5" }] },
  ]],
  ["attention", "Attention, samples, precision", [
    { key: "attention_logit", title: "Largest attention logit", help: "Over all layers; growth without end precedes divergence.", lines: [{ group: "sometimes", name: "attention_logit", label: "logit", tone: "run4" }] },
    { key: "attention_entropy", title: "Lowest attention entropy", unit: "nats", zero: true, help: "Of all layers; 0 is attention to one token only.", lines: [{ group: "sometimes", name: "attention_entropy", label: "entropy", tone: "run2" }] },
    { key: "worst_loss", title: "Worst sample of a step", unit: "nats per token", log: true, help: "The highest loss of a sample in each step.", lines: [{ name: "worst_loss", label: "worst", tone: "run6" }] },
    { key: "token_entropy", title: "Token entropy of a batch", unit: "nats", zero: true, help: "Of the distribution of its tokens: the loss of the best model of this batch without context. Repeated text lowers it, noise raises it.", lines: [{ name: "token_entropy", label: "tokens", tone: "run5" }] },
    { key: "predictive_entropy", title: "Predictive entropy", unit: "nats", zero: true, help: "Mean entropy of the model's predictions, every 25 steps: far below the loss, the model is sure of what is wrong.", lines: [{ group: "sometimes", name: "predictive_entropy", label: "predictions", tone: "run3" }] },
    { key: "fp8_saturation", title: "FP8: saturated", unit: "share", log: true, zero: true, help: "Largest share of values that saturated, over all layers.", lines: [{ group: "sometimes", name: "fp8_saturation", label: "saturated", tone: "run1" }] },
    { key: "fp8_underflow", title: "FP8: underflowed", unit: "share", log: true, zero: true, help: "Largest share of values that became zero.", lines: [{ group: "sometimes", name: "fp8_underflow", label: "underflowed", tone: "run6" }] },
    { key: "loss_scale", title: "Loss scale", log: true, help: "Of fp16.", constant: true, lines: [{ name: "loss_scale", label: "scale", tone: "run7" }] },
  ]],
  ["experts", "Experts", [
    { key: "expert_violation", title: "Largest load of an expert", unit: "times the mean", zero: true, help: "Tokens of the most chosen expert of a layer over the mean, of the layer where it is largest; 1 is even.", lines: [{ name: "expert_violation", label: "load", tone: "run1" }] },
    { key: "expert_idle", title: "Idle experts", unit: "share", share: true, zero: true, help: "Experts of all layers that no token of the step chose; and the largest share of a layer's choices that were beyond its capacity.", lines: [{ name: "expert_idle", label: "idle", tone: "run6" }, { name: "expert_dropped", label: "dropped", tone: "run4" }] },
    { key: "router_entropy", title: "Lowest entropy of a router", unit: "nats", zero: true, help: "Of a token's scores, in the mean over tokens: the logarithm of the number of experts if all are alike, 0 if one takes everything.", lines: [{ name: "router_entropy", label: "entropy", tone: "run2" }] },
    { key: "router_z", title: "Router: log-partition", help: "Root mean square of the logsumexp of its logits, of the layer where it is largest; growth without end precedes collapse.", lines: [{ name: "router_z", label: "log-partition", tone: "run3" }] },
  ]],
  ["speed", "Speed and memory", [
    { key: "tokens_per_second", title: "Tokens per second", zero: true, help: "Of the whole run.", lines: [{ name: "tokens_per_second", label: "tokens/s", tone: "run2" }] },
    { key: "mfu", title: "MFU", unit: "share of peak", share: true, zero: true, help: "Model FLOPs utilization, counting the full attention matrix: of the data sheet's peak, or, of a device that is not known, as a CPU, of a matrix product that every start measures anew, so that it may jump at a restart.", lines: [{ name: "mfu_full", label: "MFU", tone: "run5" }] },
    { key: "seconds", title: "Time of a step", unit: "seconds", zero: true, help: "Of the slowest rank, and of that the wait for data.", lines: [{ name: "seconds", label: "step", tone: "run0" }, { name: "data_seconds", label: "data", tone: "run1" }] },
    { key: "memory", title: "Device memory", unit: "GiB", zero: true, help: "The most that rank 0 had allocated.", lines: [{ name: "memory", label: "memory", tone: "run3", area: true }] },
  ]],
];

/** All plots; `loss` is apart, at the top. */
function makeCharts() {
  const loss = makePlot(LOSS);
  const groups = GROUPS.map(([id, title, specs]) => {
    const cards = specs.map((spec) => makePlot({ height: 170, ...spec }));
    const box = section(id, title, "", el("div.plots", {}, cards));
    const hide = () => { box.hidden = cards.every((card) => card.hidden); };
    state.on("plots axis", hide);
    return box;
  });
  return { loss, groups };
}
