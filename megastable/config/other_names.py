"""Maps other trainers' names to our keys, for "did you mean", the configuration reference, and Megatron-LM checkpoints.

A name maps to "KEY" or "KEY=VALUE", then "; " and the difference if the meaning is not quite the same. Names without a
key have the reason. Names are written with underscores, and without their section.
"""

from __future__ import annotations

from dataclasses import dataclass

_SAMPLES = "in steps: divide by train.global_batch"
_TOKENS = "in tokens: multiply by model.sequence_length"
_FRACTION = "in steps: multiply by train.steps"
_PAIR = "one of a pair"
_DEEPSPEED = "a setting of the file that it names"
_ROPE_KINDS = "there are three kinds, linear, llama3 and yarn"

# Megatron-LM's arguments, such as --num-layers; the reference shows these.
MEGATRON = {
    # model
    "num_layers": "model.layers",
    "encoder_num_layers": "model.layers",
    "hidden_size": "model.hidden",
    "num_attention_heads": "model.heads",
    "num_query_groups": "model.kv_heads",
    "group_query_attention": "model.kv_heads; the number of groups turns it on",
    "kv_channels": "model.head_dim",
    "ffn_hidden_size": "model.ffn; by default 8/3 of the hidden size, not 4 times",
    "seq_length": "model.sequence_length",
    "encoder_seq_length": "model.sequence_length",
    "max_position_embeddings": "model.max_positions; only for exports: rotary embeddings need no such limit",
    "vocab_size": "model.vocab_size",
    "make_vocab_size_divisible_by": "model.vocab_multiple; not multiplied by the tensor-parallel size",
    "padded_vocab_size": "model.vocab_multiple; vocab_size is rounded up to a multiple of it",
    "rotary_base": "model.rope_theta",
    "use_rope_scaling": "model.rope_scaling; kind: llama3 with its factor and original_length",
    "rope_scaling_factor": "model.rope_scaling.factor",
    "rotary_seq_len_interpolation_factor": "model.rope_scaling.factor; with kind: linear",
    "norm_epsilon": "model.norm_eps",
    "layernorm_epsilon": "model.norm_eps",
    "qk_layernorm": "model.qk_norm; on by default, always an RMSNorm",
    "add_qkv_bias": "model.qkv_bias",
    "untie_embeddings_and_output_weights": "model.tied; its opposite",
    "init_method_std": "model.init_std",
    "embedding_init_method_std": "model.init_std; matrices can have another rule, by model.init",
    "init_method_xavier_uniform": "model.init=xavier; of a normal distribution",
    **dict.fromkeys(("apply_layernorm_1p", "layernorm_zero_centered_gamma"), "model.zero_centered_norms"),
    "apply_residual_connection_post_layernorm": "model.norms; norms of the sum: mixed, deep or branch",
    "window_size": "model.window; counts the token itself: one more than the tokens before it",
    "window_attn_skip_freq": "model.full_attention_every; a number, not a list",
    "softmax_scale": "model.attention_scale",
    "activation_func_clamp_value": "model.swiglu_clamp",
    **dict.fromkeys(("quick_geglu", "openai_gelu"), "model.activation; gelu is GeGLU by tanh"),
    "hidden_dropout": "model.dropout",
    "use_mup": "model.mup; the sizes of the model that was tuned",
    **{f"yarn_{name}": f"model.rope_scaling.{ours}; with kind: yarn" for name, ours in {
        "rotary_scaling_factor": "factor", "original_max_position_embeddings": "original_length",
        "beta_fast": "beta_fast", "beta_slow": "beta_slow"}.items()},
    # data
    "data_path": "data.corpora; a list of folders and weights, from megastable prepare",
    "train_data_path": "data.corpora; a list of folders and weights, from megastable prepare",
    "valid_data_path": "data.validation; a list of folders, from megastable prepare",
    "num_workers": "data.prefetch; in steps, not processes",
    "reset_attention_mask": "data.keep_documents_apart=true",
    "reset_position_ids": "data.keep_documents_apart=true",
    "iterations_to_skip": "data.skip; ranges of samples: multiply by train.global_batch",
    # optimizer and schedule
    "optimizer": "optimizer.name; adam is adamw, whose decay is decoupled",
    "sgd_momentum": "optimizer.momentum",
    "lr": "optimizer.lr",
    "adam_beta1": f"optimizer.betas; {_PAIR}, the first",
    "adam_beta2": f"optimizer.betas; {_PAIR}, the second",
    "adam_eps": "optimizer.eps",
    "weight_decay": "optimizer.weight_decay",
    "clip_grad": "optimizer.clip",
    "exp_avg_dtype": "optimizer.moments; fp32 or bf16, of both moments",
    "exp_avg_sq_dtype": "optimizer.moments; fp32 or bf16, of both moments",
    "use_precision_aware_optimizer": "optimizer.moments; only the moments can be other than fp32",
    "lr_decay_style": "schedule.kind; wsd in small letters; no inverse-square-root",
    "lr_warmup_iters": "schedule.warmup_steps",
    "lr_warmup_samples": f"schedule.warmup_tokens; {_TOKENS}",
    "lr_warmup_fraction": "schedule.warmup_steps; in steps: multiply by schedule.total_steps",
    "lr_decay_iters": "schedule.total_steps",
    "lr_decay_samples": f"schedule.total_tokens; {_TOKENS}",
    "lr_wsd_decay_iters": "schedule.decay_steps",
    "lr_wsd_decay_style": "schedule.decay; minus_sqrt is sqrt; no exponential",
    "lr_wsd_decay_samples": f"schedule.decay_tokens; {_TOKENS}",
    "min_lr": "schedule.floor; a share of the peak: divide by optimizer.lr",
    # train
    "train_iters": "train.steps",
    "train_samples": f"train.steps; {_SAMPLES}",
    "exit_interval": "train.steps; schedule.total_steps keeps the schedule as it is",
    "global_batch_size": "train.global_batch",
    "micro_batch_size": "train.micro_batch",
    "rampup_batch_size": "train.batch_warmup; start, increment, tokens: its samples times model.sequence_length",
    "eval_interval": "train.eval_interval",
    "eval_iters": "train.eval_samples; in samples: multiply by train.global_batch",
    "seed": "run.seed",
    "deterministic_mode": "run.deterministic",
    "distributed_timeout_minutes": "run.timeout; in seconds: multiply by 60",
    # parallel
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "context_parallel_size": "parallel.context; by all-to-all over the heads, not a ring",
    "sequence_parallel": "parallel.sequence",
    "use_distributed_optimizer": "parallel.zero=1; the default",
    "data_parallel_sharding_strategy": "parallel.zero; a ZeRO stage",
    "use_torch_fsdp2": "parallel.zero=3",
    "use_megatron_fsdp": "parallel.zero; the stage follows from --data-parallel-sharding-strategy",
    "recompute_activations": "parallel.recompute=selective",
    "recompute_granularity": "parallel.recompute",
    "recompute_method": "parallel.recompute; of every block or of none",
    "recompute_num_layers": "parallel.recompute; of every block or of none",
    "overlap_grad_reduce": f"deepspeed; overlap_comm, {_DEEPSPEED}",
    "overlap_param_gather": "deepspeed; ZeRO 1 and 2 overlap the reduction of gradients only",
    # precision and kernels
    "bf16": "precision.kind=bf16",
    "fp16": "precision.kind=fp16",
    "params_dtype": "precision.kind",
    "initial_loss_scale": "precision.initial_scale_power; its power of 2",
    "loss_scale_window": "precision.scale_window",
    "min_loss_scale": f"deepspeed; fp16.min_loss_scale, {_DEEPSPEED}",
    "hysteresis": f"deepspeed; fp16.hysteresis, {_DEEPSPEED}",
    "fp8_format": "precision.fp8.formats; FP8 is turned on by precision.fp8=current, delayed or block",
    "fp8_recipe": "precision.fp8.recipe; current for tensorwise, block for blockwise",
    "fp8_margin": "precision.fp8.margin",
    "fp8_amax_history_len": "precision.fp8.history",
    "first_last_layers_bf16": "precision.fp8.keep_first; and keep_last, each with a number",
    "num_layers_at_start_in_bf16": "precision.fp8.keep_first",
    "num_layers_at_end_in_bf16": "precision.fp8.keep_last",
    "attention_backend": "kernels.attention",
    "use_flash_attn": "kernels.attention=sdpa",
    "transformer_impl": "kernels.attention; te for Transformer Engine's; linear layers: precision.fp8.backend",
    "cross_entropy_loss_fusion": "kernels.loss=chunked",
    # checkpoints and logs
    "save": "run.dir",
    "load": "run.dir; one that exists is resumed",
    "save_interval": "checkpoint.interval",
    "save_retain_interval": "checkpoint.keep_every",
    "async_save": "checkpoint.asynchronous",
    "non_persistent_save_interval": "checkpoint.interval; with checkpoint.staging for a local disk",
    "log_interval": "logging.interval",
    "tensorboard_dir": "logging.trackers=[tensorboard]; the files are in the run directory",
    "wandb_project": "logging.project; with wandb in logging.trackers",
    "wandb_exp_name": "run.name; with wandb in logging.trackers",
    "profile_step_start": "logging.profile.start",
    "profile_step_end": "logging.profile.steps; their number, not the last one",
    "profile_ranks": "logging.profile.ranks",
    "nvtx_ranges": "logging.nvtx",
    "check_for_spiky_loss": "stability.enabled=true; the default",
}  # fmt: skip

_SWIGLU = "the MLP is always gated, a SwiGLU or a GeGLU: model.activation"
_DENSE = "experts are not supported; megastable trains dense models"
_ROPE = "positions are always rotary embeddings of whole heads, half-split"
_ATTENTION = (
    "attention is causal, softmax, multi-head or grouped-query, to all tokens or those in model.window"
)
_ALIKE = "all blocks are alike, attention and MLP"
_DROPOUT = "attention has no dropout: model.dropout is of embeddings and residual branches"
_BIAS = "the only biases are those of model.qkv_bias"
_RMSNORM = "norms are always RMSNorms: model.norms and model.zero_centered_norms"
_INTERLEAVED = "interleaved pipeline stages are not supported: parallel.pipeline has plain ones"
_TOKENIZER = "a corpus brings its tokenizer along: megastable prepare takes it"
_CONSTANT_DECAY = "weight decay is constant: optimizer.weight_decay"
_OFFLOAD = "offloading is not supported: use more ranks or a higher parallel.zero"
_WANDB = "wandb's own variables say it, WANDB_DIR and WANDB_ENTITY; logging.trackers names wandb"

# Megatron-LM's arguments that have no key, and why.
MEGATRON_WITHOUT_KEY = {
    **dict.fromkeys(("swiglu", "squared_relu", "glu_linear_offset"), _SWIGLU),
    **dict.fromkeys(("add_bias_linear", "disable_bias_linear"), _BIAS),
    "normalization": _RMSNORM,
    "qk_l2_norm": "a norm of queries and keys is an RMSNorm with weights: model.qk_norm",
    **dict.fromkeys(("position_embedding_type", "use_rotary_position_embeddings"), _ROPE),
    **dict.fromkeys(("rotary_percent", "rotary_interleaved", "no_rope_freq"), _ROPE),
    **dict.fromkeys(("num_experts", "num_moe_experts", "expert_model_parallel_size"), _DENSE),
    **dict.fromkeys(("expert_tensor_parallel_size", "moe_router_topk", "moe_grouped_gemm"), _DENSE),
    **dict.fromkeys(("multi_latent_attention", "experimental_attention_variant"), _ATTENTION),
    **dict.fromkeys(("linear_attention_freq", "attention_output_gate"), _ATTENTION),
    "softmax_type": "the softmax of attention is the plain one",
    **dict.fromkeys(("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model", "spec"), _ALIKE),
    **dict.fromkeys(("heterogeneous_block_specs", "heterogeneous_layers_config_path"), _ALIKE),
    "mtp_num_layers": "multi-token prediction is not supported: the next token is predicted",
    "enable_mhc_connections": "the residual stream is always one",
    "attention_dropout": _DROPOUT,
    "virtual_pipeline_model_parallel_size": _INTERLEAVED,
    "num_layers_per_virtual_pipeline_stage": _INTERLEAVED,
    **dict.fromkeys(("start_weight_decay", "end_weight_decay", "weight_decay_incr_style"), _CONSTANT_DECAY),
    "lr_warmup_init": "warm-up begins at optimizer.lr / schedule.warmup_steps",
    "optimizer_cpu_offload": _OFFLOAD,
    "loss_scale": "the loss scale of fp16 is always dynamic: precision.initial_scale_power",
    "accumulate_allreduce_grads_in_fp32": "gradients are always summed in fp32",
    "fp8_amax_compute_algo": "delayed scales are always those of the largest magnitude in precision.fp8.history",
    "fp8_param_gather": "parameters are gathered in precision.kind: precision.fp8 is for products",
    **dict.fromkeys(("tokenizer_model", "tokenizer_type", "vocab_file", "merge_file"), _TOKENIZER),
    "split": "megastable prepare sets documents aside for validation",
    "test_data_path": "data.validation; its sets are never trained on",
    "data_cache_path": "the order of the data is computed: no index of it is kept",
    "mock_data": "prepare real text instead: megastable prepare stdlib --output data/stdlib",
    "exit_duration_in_mins": "let the scheduler send SIGTERM: a checkpoint is written, and the next start goes on",
    "exit_signal_handler": "always so: SIGTERM writes a checkpoint and ends the run with code 75",
    **dict.fromkeys(("ckpt_format", "use_dist_ckpt"), "there is one format, which every parallel layout can load"),
    "check_for_nan_in_loss_and_grad": "always so: updates that are not finite are refused",
    **dict.fromkeys(("wandb_save_dir", "wandb_entity"), _WANDB),
}  # fmt: skip

# DeepSpeed, torchtitan, nanoGPT, Llama's params.json, Hugging Face's config.json and TrainingArguments.
OTHERS = {
    # sizes of the model
    **dict.fromkeys(("n_layer", "n_layers", "num_hidden_layers"), "model.layers"),
    **dict.fromkeys(("n_embd", "d_model", "dim"), "model.hidden"),
    **dict.fromkeys(("n_head", "n_heads"), "model.heads"),
    **dict.fromkeys(("n_kv_heads", "num_key_value_heads"), "model.kv_heads"),
    **dict.fromkeys(("intermediate_size", "n_inner", "hidden_dim"), "model.ffn"),
    **dict.fromkeys(("block_size", "n_ctx", "n_positions", "seq_len", "max_seq_len"), "model.sequence_length"),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), "model.norm_eps"),
    "rope_parameters": f"model.rope_scaling; {_ROPE_KINDS}",
    "rope_type": f"model.rope_scaling.kind; {_ROPE_KINDS}",
    "original_max_position_embeddings": "model.rope_scaling.original_length",
    "use_qk_norm": "model.qk_norm",
    "attention_bias": "model.qkv_bias; of queries, keys and values only",
    "tie_word_embeddings": "model.tied",
    "initializer_range": "model.init_std",
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), "model.activation; gelu is by tanh"),
    "sliding_window": "model.window",
    **dict.fromkeys(("layer_types", "sliding_window_pattern"), "model.full_attention_every; of every n-th block"),
    "query_pre_attn_scalar": "model.attention_scale; one over its root",
    "attn_logit_softcapping": "model.attention_softcap",
    "final_logit_softcapping": "model.logit_softcap",
    **dict.fromkeys(("embedding_multiplier", "embed_scale"), "model.embedding_scale"),
    "swiglu_limit": "model.swiglu_clamp",
    **dict.fromkeys(("dropout", "resid_pdrop", "embd_pdrop", "resid_dropout"), "model.dropout"),
    # batch and length of the run
    "train_batch_size": "train.global_batch",
    **dict.fromkeys(("train_micro_batch_size_per_gpu", "per_device_train_batch_size"), "train.micro_batch"),
    "local_batch_size": "train.micro_batch; of one pass: gradients are accumulated up to train.global_batch",
    "batch_size": "train.micro_batch; of one pass on one rank; train.global_batch is that of a step",
    "gradient_accumulation_steps": "train.global_batch; accumulation follows from it, train.micro_batch and the ranks",
    **dict.fromkeys(("max_steps", "max_iters", "num_iterations"), "train.steps"),
    "num_train_epochs": "train.steps; in steps: tokens / (train.global_batch x model.sequence_length)",
    "eval_steps": "train.eval_interval",
    # optimizer and schedule
    **dict.fromkeys(("optim", "optimizer_type"), "optimizer.name; in small letters, as adamw"),
    "learning_rate": "optimizer.lr",
    **dict.fromkeys(("beta1", "beta2"), f"optimizer.betas; {_PAIR}"),
    "adam_epsilon": "optimizer.eps",
    **dict.fromkeys(("grad_clip", "gradient_clipping", "max_grad_norm", "max_norm"), "optimizer.clip"),
    **dict.fromkeys(("clip_grad_value", "clip_value", "clipvalue"), "optimizer.clipping.threshold; with kind: value"),
    **dict.fromkeys(("gradient_clip_val", "clip_grad_norm", "clip_grad_norm_value"), "optimizer.clip"),
    "gradient_clip_algorithm": "optimizer.clipping.kind; norm or value",
    "z_thresh": "optimizer.clipping.threshold; with kind: zclip",
    **dict.fromkeys(("warmup_iters", "warmup_num_steps"), "schedule.warmup_steps"),
    "warmup_ratio": f"schedule.warmup_steps; {_FRACTION}",
    **dict.fromkeys(("lr_scheduler_type", "decay_type"), "schedule.kind"),
    "decay_lr": "schedule.kind; constant for false",
    "decay_ratio": f"schedule.decay_steps; {_FRACTION}",
    "min_lr_factor": "schedule.floor",
    # layout
    "tensor_parallel_degree": "parallel.tensor",
    "pipeline_parallel_degree": "parallel.pipeline",
    "context_parallel_degree": "parallel.context",
    "data_parallel_shard_degree": "parallel.zero; over all data-parallel ranks: those left by the other sizes",
    **dict.fromkeys(("zero_optimization", "zero_stage"), "parallel.zero; its stage"),
    "gradient_checkpointing": "parallel.recompute=full",
    **dict.fromkeys(("activation_checkpointing", "activation_checkpoint"), "parallel.recompute"),
    # the rest
    **dict.fromkeys(("dtype", "torch_dtype", "mixed_precision", "mixed_precision_param"), "precision.kind"),
    "attn_implementation": "kernels.attention",
    "torch_compile": "kernels.compile",
    **dict.fromkeys(("dataset", "dataset_path", "train_files"), "data.corpora; folders from megastable prepare"),
    **dict.fromkeys(("output_dir", "out_dir", "dump_folder", "save_dir"), "run.dir"),
    **dict.fromkeys(("resume", "resume_from_checkpoint"), "run.dir; one that exists is resumed"),
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep",
    "async_mode": "checkpoint.asynchronous",
    **dict.fromkeys(("logging_steps", "steps_per_print", "log_freq"), "logging.interval"),
    **dict.fromkeys(("wandb_log", "enable_wandb"), "logging.trackers=[wandb]"),
    **dict.fromkeys(("wandb_run_name", "run_name"), "run.name"),
    "enable_tensorboard": "logging.trackers=[tensorboard]",
    "report_to": "logging.trackers",
    **dict.fromkeys(("overlap_comm", "wall_clock_breakdown", "flops_profiler"), f"deepspeed; {_DEEPSPEED}"),
}  # fmt: skip

OTHERS_WITHOUT_KEY = {
    **dict.fromkeys(("bias", "mlp_bias"), _BIAS),
    "attn_pdrop": _DROPOUT,
    **dict.fromkeys(("num_local_experts", "num_experts_per_tok", "n_routed_experts"), _DENSE),
    "kv_lora_rank": _ATTENTION,
    "partial_rotary_factor": _ROPE,
    **dict.fromkeys(("offload_optimizer", "offload_param", "cpu_offload"), _OFFLOAD),
    "data_parallel_replicate_degree": "data parallelism takes what the other sizes leave of the ranks",
    **dict.fromkeys(("flavor", "init_from"), "sizes are given one by one, as model.layers: see launch/recipes/"),
    "tokenizer_path": _TOKENIZER,
}  # fmt: skip


@dataclass(frozen=True)
class OtherName:
    """Our counterpart of another trainer's name: KEY or KEY=VALUE, "" for none; and the difference, or the reason."""

    ours: str
    note: str


def known_elsewhere(name: str) -> OtherName | None:
    """Look up a name of another trainer, with - or _, with or without leading dashes."""
    plain = name.lstrip("-").replace("-", "_").lower()
    if ours := (MEGATRON | OTHERS).get(plain):
        key, _, note = ours.partition("; ")
        return OtherName(key, note)
    if reason := (MEGATRON_WITHOUT_KEY | OTHERS_WITHOUT_KEY).get(plain):
        return OtherName("", reason)
    return None
