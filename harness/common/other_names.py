"""Configuration keys of nanoGPT, Hugging Face transformers and earlier versions of this program, and what error
messages suggest instead of them."""

from __future__ import annotations

STEPS = "in global steps"
SEQUENCES = "sequences per device and forward pass"
DROP_RATES = "one rate, or an object with embedding, attention_weights, attention_output and mlp_output"

# For each of a run's two files: another program's key -> (our key, how to convert the value, or "" if it is the same).
COUNTERPARTS = {
    "train.json": {
        **dict.fromkeys(("adam_beta1", "beta1"), ("betas", "its first number")),
        **dict.fromkeys(("adam_beta2", "beta2"), ("betas", "its second number")),
        "adam_epsilon": ("eps", ""),
        "attn_implementation": ("attention", '"cudnn", "flash" or "efficient"'),
        **dict.fromkeys(("batch_size", "per_device_train_batch_size"), ("microbatch_size", SEQUENCES)),
        **dict.fromkeys(("bf16", "fp16", "dtype"), ("precision", '"bf16", "fp16" or "fp32"')),
        **dict.fromkeys(("eval_interval", "eval_steps"), ("validation_interval", STEPS)),
        "eval_iters": ("validation_batches", "in microbatches"),
        **dict.fromkeys(("grad_clip", "max_grad_norm"), ("clipping_max_norm", "null for no clipping")),
        "gradient_checkpointing": ("activation_checkpointing", ""),
        "init_from": ("initial_weights", "a safetensors file; no key is needed to continue a run"),
        **dict.fromkeys(("log_interval", "logging_steps"), ("report_interval", STEPS)),
        "lr": ("learning_rate", ""),
        **dict.fromkeys(("max_iters", "max_steps"), ("train_steps", STEPS)),
        "min_lr": ("min_lr_ratio", "min_lr divided by learning_rate"),
        "num_train_epochs": ("epochs", 'with "min_train_tokens": -1'),
        "save_steps": ("checkpoint_interval", STEPS),
        "seed": ("random_seed", ""),
        "warmup_iters": ("warmup_steps", STEPS),
        "warmup_ratio": ("warmup_period_percent", "times 100"),
        **dict.fromkeys(("target_dollars", "target_hours"), ("train_steps", STEPS)),  # keys of our earlier versions
    },
    "model.json": {
        "bias": ("qkv_bias", "for queries, keys and values; linear_bias is for a block's other layers"),
        **dict.fromkeys(("block_size", "max_position_embeddings", "n_ctx", "n_positions"), ("context_length", "")),
        "dropout": ("drop_rate", DROP_RATES),
        "hidden_act": ("mlp", '"gelu" (GPT-2\'s tanh approximation), "relu2" or "swiglu" (gated, with silu)'),
        **dict.fromkeys(("hidden_size", "n_embd"), ("emb_dim", "")),
        "intermediate_size": ("mlp_dim", ""),
        **dict.fromkeys(("n_head", "num_attention_heads"), ("n_heads", "")),
        **dict.fromkeys(("n_layer", "num_hidden_layers"), ("n_layers", "")),
        "num_key_value_heads": ("n_kv_heads", ""),
        "num_local_experts": ("moe", "an object with num_experts and num_active_experts"),
        "rope_theta": ("rope_base", 'together with "position": "rope"'),
        "tie_word_embeddings": ("tie_weights", ""),
    },
}

NO_TRACKER = "not a setting here: metrics.jsonl records all metrics; remove this key"
WITHOUT_KEY = {
    **dict.fromkeys(("wandb_log", "wandb_project", "wandb_run_name", "report_to"), NO_TRACKER),
    **dict.fromkeys(("backend", "device"), "not a setting here: always nccl on GPUs and gloo on CPUs; remove this key"),
    **dict.fromkeys(
        ("out_dir", "output_dir"), "not a setting here: results go to the run's own folder; remove this key"
    ),
    "resume_from_checkpoint": "not a setting here: the same command continues a run; remove this key",
    "always_save_checkpoint": (
        "not a setting here: every checkpoint is kept unless keep_checkpoints is set; remove this key"
    ),
    "coordinate_descent_tuning": (
        "no longer a setting: steps were 0.4 % faster, and each start took 94 s longer; remove this key"
    ),
    "exact_dropout": "no longer a setting: a drop_rate of n/16 is exact with every attention kernel; remove this key",
    "z_loss": "no longer a setting: the z-loss changed no loss beyond training noise; remove this key",
    "lr_decay_iters": "not a setting here: the schedule ends with the run; remove this key",
}


def advice(key: str, file: str) -> str | None:
    """Return the error message about another program's or an earlier version's `key` in `file`, or None if the tables
    above do not have the key."""
    name = key.lower().replace("-", "_")
    if name in WITHOUT_KEY:
        return WITHOUT_KEY[name]
    for place, names in COUNTERPARTS.items():
        if name in names:
            ours, note = names[name]
            where = "" if place == file else f" in {place}"
            remark = f" ({note})" if note else ""
            return f'unknown; did you mean "{ours}"{where}{remark}?'
    return None
