"""The keys of nanoGPT and Hugging Face transformers that have other names here, for the advice about an unknown key."""

from __future__ import annotations

from dataclasses import dataclass

TRAIN, MODEL = "train.json", "model.json"


@dataclass(frozen=True)
class Counterpart:
    """Our key for something, in one of a run's two files. `note` says how values convert, where they do not stay."""

    file: str
    key: str
    note: str = ""


SEQUENCES = "sequences per device and forward pass"
ONE_DROPOUT = "one rate, or an object of embedding, attention_weights, attention_output and mlp_output"
STEPS = "in global steps"

# (another program's key: our key, and how the value converts)
_TRAINING = {
    "adam_beta1": ("betas", "the first of the two"),
    "adam_beta2": ("betas", "the second of the two"),
    "adam_epsilon": ("eps", ""),
    "batch_size": ("microbatch_size", SEQUENCES),
    "beta1": ("betas", "the first of the two"),
    "beta2": ("betas", "the second of the two"),
    "bf16": ("precision", 'true: "bf16"'),
    "dtype": ("precision", '"bf16", "fp16" or "fp32"'),
    "eval_interval": ("validation_interval", STEPS),
    "eval_iters": ("validation_batches", "in microbatches"),
    "eval_steps": ("validation_interval", STEPS),
    "fp16": ("precision", 'true: "fp16"'),
    "grad_clip": ("clipping_max_norm", "null: none"),
    "gradient_checkpointing": ("activation_checkpointing", ""),
    "init_from": ("initial_weights", "a safetensors file; continuing needs no key"),
    "log_interval": ("report_interval", STEPS),
    "logging_steps": ("report_interval", STEPS),
    "lr": ("learning_rate", ""),
    "lr_scheduler_type": ("lr_schedule", '"constant", "cosine", "wsd" or "linear"'),
    "max_grad_norm": ("clipping_max_norm", "null: none"),
    "max_iters": ("train_steps", STEPS),
    "max_steps": ("train_steps", STEPS),
    "min_lr": ("min_lr_ratio", "over learning_rate"),
    "num_train_epochs": ("min_train_tokens", "in tokens; -1: all of the split once"),
    "per_device_train_batch_size": ("microbatch_size", SEQUENCES),
    "save_steps": ("checkpoint_interval", STEPS),
    "seed": ("random_seed", ""),
    "warmup_iters": ("warmup_steps", STEPS),
    "warmup_ratio": ("warmup_period_percent", "times 100"),
    # Keys of earlier versions.
    "target_dollars": ("train_steps", STEPS),
    "target_hours": ("train_steps", STEPS),
}
_SHAPE = {
    "bias": ("qkv_bias", "of queries, keys and values; linear_bias is of a block's other layers"),
    "block_size": ("context_length", ""),
    "dropout": ("drop_rate", ONE_DROPOUT),
    "hidden_act": ("mlp", '"gelu" (GPT-2\'s, by tanh), "relu2" or "swiglu" (gated, with silu)'),
    "hidden_size": ("emb_dim", ""),
    "intermediate_size": ("mlp_dim", ""),
    "max_position_embeddings": ("context_length", ""),
    "n_ctx": ("context_length", ""),
    "n_embd": ("emb_dim", ""),
    "n_head": ("n_heads", ""),
    "n_layer": ("n_layers", ""),
    "n_positions": ("context_length", ""),
    "num_attention_heads": ("n_heads", ""),
    "num_hidden_layers": ("n_layers", ""),
    "num_key_value_heads": ("n_kv_heads", ""),
    "num_local_experts": ("moe", "an object of num_experts and num_active_experts"),
    "rope_theta": ("rope_base", 'beside "position": "rope"'),
    "tie_word_embeddings": ("tie_weights", ""),
}

COUNTERPARTS = {name: Counterpart(TRAIN, *ours) for name, ours in _TRAINING.items()}
COUNTERPARTS |= {name: Counterpart(MODEL, *ours) for name, ours in _SHAPE.items()}

# What has no key here, and why.
WITHOUT_KEY = {
    **dict.fromkeys(
        ("wandb_log", "wandb_project", "wandb_run_name", "report_to"),
        "there is no tracker here: metrics.jsonl holds every number; remove it",
    ),
    **dict.fromkeys(
        ("backend", "device"), "not a setting here: nccl on GPUs, gloo on CPUs, a process for each device; remove it"
    ),
    **dict.fromkeys(("out_dir", "output_dir"), "not a setting here: results go to the run's own folder; remove it"),
    "resume_from_checkpoint": "not a setting here: the same command continues a run; remove it",
    "always_save_checkpoint": "not a setting here: every checkpoint is kept unless keep_checkpoints is set; remove it",
    "exact_dropout": "no longer a setting: a drop_rate in sixteenths is exact with every attention kernel; remove it",
    "z_loss": "no longer a setting: it changed no loss beyond training noise; remove it",
    "lr_decay_iters": "not a setting here: the schedule ends with the run; remove it",
}


def advice(key: str, file: str) -> tuple[str | None, str] | None:
    """Our key for another program's `key` (None unless it belongs in our `file`), and the message about it.

    None for a key that is in none of these programs.
    """
    name = key.lower().replace("-", "_")
    if name in WITHOUT_KEY:
        return None, WITHOUT_KEY[name]
    if name not in COUNTERPARTS:
        return None
    ours = COUNTERPARTS[name]
    here = ours.file == file
    place = f'"{ours.key}"{"" if here else f" in {ours.file}"}'
    return ours.key if here else None, f"unknown; did you mean {place}{f' ({ours.note})' if ours.note else ''}?"
