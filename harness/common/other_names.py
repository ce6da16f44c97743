"""What keys of other programs' configurations are called here, for the advice about a key that is unknown.

The names are those of nanoGPT's and nanochat's settings, llm.c's options, Hugging Face transformers' TrainingArguments
and model configurations, and the lab notebook's newest runs; for the architecture those of litgpt, Megatron-LM and
Llama's own program, too, and names of switches (`rope`, `swiglu`) that people expect.
"""

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
BATCH_TOKENS = "counted in sequences: the tokens over context_length"
ONE_DROPOUT = "one rate, or an object of embedding, attention_weights, attention_output and mlp_output"
EXPERTS = "an object of num_experts and num_active_experts"
ROPE = 'beside "position": "rope"'
FIRST_BETA, SECOND_BETA = "the first of the two", "the second of the two"
STEPS, MICROBATCHES = "in global steps", "in microbatches"
ALL_ONCE = "in tokens; -1: all of the split once"

# (another program's key: our key, and how the value converts)
_TRAINING = {
    "adam_beta1": ("betas", FIRST_BETA),
    "adam_beta2": ("betas", SECOND_BETA),
    "adam_epsilon": ("eps", ""),
    "aux_loss_coef": ("moe_router_loss_scale", ""),
    "batch_size": ("microbatch_size", SEQUENCES),
    "beta1": ("betas", FIRST_BETA),
    "beta2": ("betas", SECOND_BETA),
    "bf16": ("precision", 'true: "bf16"'),
    "clip_grad": ("clipping_max_norm", "null: none"),
    "clip_grad_norm": ("clipping_max_norm", "null: none"),
    "cooldown_frac": ("decay_period_percent", "times 100"),
    "core_metric_every": ("benchmark_interval", STEPS),
    "core_metric_max_per_task": ("benchmark_examples", ""),
    "data_path": ("dataset", "owner/name"),
    "decay_lr": ("lr_schedule", 'true: "cosine", false: "constant"'),
    "device_batch_size": ("microbatch_size", SEQUENCES),
    "dtype": ("precision", '"bf16", "fp16" or "fp32"'),
    "embedding_lr": ("embedding_learning_rate", ""),
    "epochs": ("min_train_tokens", ALL_ONCE),
    # Keys of earlier versions.
    "target_dollars": ("train_steps", STEPS),
    "target_hours": ("train_steps", STEPS),
    "eval_batches": ("validation_batches", MICROBATCHES),
    "eval_every": ("validation_interval", STEPS),
    "eval_interval": ("validation_interval", STEPS),
    "eval_iters": ("validation_batches", MICROBATCHES),
    "eval_steps": ("validation_interval", STEPS),
    "eval_tokens": ("validation_batches", "in microbatches: the tokens over microbatch_size x context_length"),
    "final_lr_frac": ("min_lr_ratio", ""),
    "fp16": ("precision", 'true: "fp16"'),
    "grad_accum_steps": ("gradient_accumulation_steps", "of each rank"),
    "grad_clip": ("clipping_max_norm", "null: none"),
    "gradient_checkpointing": ("activation_checkpointing", ""),
    "gradient_clipping": ("clipping_max_norm", "null: none"),
    "init_from": ("initial_weights", "a safetensors file; continuing needs no key"),
    "input_bin": ("dataset", "owner/name; prepare_datasets.py --from-bin makes one of .bin files"),
    "input_val_bin": ("dataset", "its validation split; prepare_datasets.py --from-bin makes one of .bin files"),
    "learning_rate_decay_frac": ("min_lr_ratio", ""),
    "log_interval": ("report_interval", STEPS),
    "logging_steps": ("report_interval", STEPS),
    "lr": ("learning_rate", ""),
    "lr_scheduler": ("lr_schedule", '"constant", "cosine", "wsd" or "linear"'),
    "lr_scheduler_type": ("lr_schedule", '"constant", "cosine", "wsd" or "linear"'),
    "lm_head_lr": ("head_learning_rate", ""),
    "matrix_lr": ("muon_learning_rate", 'with "optimizer": "muon"'),
    "max_epochs": ("min_train_tokens", ALL_ONCE),
    "max_grad_norm": ("clipping_max_norm", "null: none"),
    "max_iters": ("train_steps", STEPS),
    "max_lr": ("learning_rate", ""),
    "max_steps": ("train_steps", STEPS),
    "micro_batch_size": ("microbatch_size", SEQUENCES),
    "min_lr": ("min_lr_ratio", "over learning_rate"),
    "minibatch": ("microbatch_size", SEQUENCES),
    "mixed_precision": ("precision", '"bf16", "fp16" or "fp32"'),
    "moe_aux_loss_coeff": ("moe_router_loss_scale", ""),
    "muon_lr": ("muon_learning_rate", 'with "optimizer": "muon"'),
    "n_epochs": ("min_train_tokens", ALL_ONCE),
    "num_epochs": ("min_train_tokens", ALL_ONCE),
    "num_iterations": ("train_steps", STEPS),
    "num_train_epochs": ("min_train_tokens", ALL_ONCE),
    "num_warmup_steps": ("warmup_steps", STEPS),
    "optim": ("optimizer", '"adamw" or "muon"'),
    "per_device_eval_batch_size": ("microbatch_size", "in validation, too"),
    "per_device_train_batch_size": ("microbatch_size", SEQUENCES),
    "per_gpu_eval_batch_size": ("microbatch_size", "in validation, too"),
    "per_gpu_train_batch_size": ("microbatch_size", SEQUENCES),
    "rampup_batch_size": ("batch_ramp", "pairs of tokens and sequences, as in [[0, 8], [1000000, 16]]"),
    "recompute": ("activation_checkpointing", ""),
    "router_aux_loss_coef": ("moe_router_loss_scale", "over n_layers: the blocks' losses are added up here"),
    "sample_every": ("sample_interval", STEPS),
    "save_every": ("checkpoint_interval", STEPS),
    "save_interval": ("checkpoint_interval", STEPS),
    "save_steps": ("checkpoint_interval", STEPS),
    "save_total_limit": ("keep_checkpoints", ""),
    "scalar_lr": ("vector_learning_rate", ""),
    "seed": ("random_seed", ""),
    "target_param_data_ratio": ("tokens_per_parameter", "of all parameters; nanochat leaves embeddings out"),
    "torch_compile": ("compile", ""),
    "torch_dtype": ("precision", '"bf16", "fp16" or "fp32"'),
    "total_batch_size": ("global_batch_size", BATCH_TOKENS),
    "train_batch_size": ("global_batch_size", "in sequences, of all ranks"),
    "train_micro_batch_size_per_gpu": ("microbatch_size", SEQUENCES),
    "unembedding_lr": ("head_learning_rate", ""),
    "use_muon": ("optimizer", 'true: "muon"'),
    "val_every": ("validation_interval", STEPS),
    "val_loss_every": ("validation_interval", STEPS),
    "val_max_steps": ("validation_batches", MICROBATCHES),
    "warmdown_ratio": ("decay_period_percent", "times 100"),
    "warmup_iters": ("warmup_steps", STEPS),
    "warmup_ratio": ("warmup_period_percent", "times 100"),
    "z_loss_coef": ("z_loss", ""),
    "z_loss_weight": ("z_loss", ""),
    "zero_stage": ("shard_optimizer", "true: stage 1"),
}

MLP = '"gelu" (GPT-2\'s, by tanh), "relu2" or "swiglu" (gated, with silu)'
_SHAPE = {
    "attention_bias": ("qkv_bias", ""),
    "attention_dropout": ("drop_rate", ONE_DROPOUT),
    "attention_probs_dropout_prob": ("drop_rate", ONE_DROPOUT),
    "attn_pdrop": ("drop_rate", ONE_DROPOUT),
    "bias": ("qkv_bias", "of queries, keys and values; linear_bias is of a block's other layers"),
    "block_size": ("context_length", ""),
    "d_model": ("emb_dim", ""),
    "dropout": ("drop_rate", ONE_DROPOUT),
    "embd_pdrop": ("drop_rate", ONE_DROPOUT),
    "final_logit_softcapping": ("logit_softcap", ""),
    "head_size": ("head_dim", ""),
    "intermediate_size": ("mlp_dim", ""),
    "mlp_bias": ("linear_bias", ""),
    "mlp_ratio": ("mlp_dim", "times emb_dim"),
    "n_inner": ("mlp_dim", ""),
    "hidden_dropout_prob": ("drop_rate", ONE_DROPOUT),
    "hidden_size": ("emb_dim", ""),
    "max_position_embeddings": ("context_length", ""),
    "max_seq_len": ("context_length", ""),
    "max_seq_length": ("context_length", ""),
    "model_dim": ("emb_dim", ""),
    "n_ctx": ("context_length", ""),
    "n_embd": ("emb_dim", ""),
    "n_head": ("n_heads", ""),
    "n_kv_head": ("n_kv_heads", ""),
    "n_layer": ("n_layers", ""),
    "n_positions": ("context_length", ""),
    "num_attention_heads": ("n_heads", ""),
    "num_heads": ("n_heads", ""),
    "num_hidden_layers": ("n_layers", ""),
    "num_key_value_heads": ("n_kv_heads", ""),
    "num_layers": ("n_layers", ""),
    "padded_vocab_size": ("vocab_size", ""),
    "resid_pdrop": ("drop_rate", ONE_DROPOUT),
    "rope_parameters": ("rope_base", "its rope_theta"),
    "rope_theta": ("rope_base", ROPE),
    "seq_len": ("context_length", ""),
    "seq_length": ("context_length", ""),
    "sequence_len": ("context_length", ""),
    "sequence_length": ("context_length", ""),
    "tie_word_embeddings": ("tie_weights", ""),
    "weight_tying": ("tie_weights", ""),
}
# What goes by many names.
_LEVERS = {
    ("mlp", MLP): "activation activation_fn activation_function gated_mlp gelu hidden_act mlp_type relu2 relu_squared "
    "squared_relu swiglu use_swiglu",
    ("mlp_dim", ""): "d_ff ffn_dim ffn_hidden_size",
    ("norm", '"layernorm" or "rmsnorm"'): "layer_norm layernorm norm_class_name norm_type normalization rms_norm "
    "rmsnorm use_rmsnorm",
    ("position", '"learned" or "rope"'): "pos_emb pos_encoding position_embedding position_embedding_type "
    "positional_encoding rope rotary rotary_emb use_rope use_rotary",
    ("rope_base", ROPE): "rotary_base theta",
    ("qk_norm", ""): "norm_qk qk_layernorm use_qk_norm",
    ("logit_softcap", "null: none"): "logit_cap logits_soft_cap logits_softcap soft_cap softcap softcapping",
    ("tie_weights", ""): "share_embeddings tie_embeddings tied tied_embeddings",
    ("qkv_bias", ""): "add_qkv_bias attn_bias use_qkv_bias",
    ("linear_bias", ""): "add_bias_linear",
    ("n_kv_heads", "how many heads of keys and values"): "gqa n_query_groups num_query_groups",
    ("head_dim", ""): "d_head kv_channels",
    ("initialisation", '"gpt2" or "zero_residual"'): "init init_method zero_init",
    ("value_embeddings", "how many"): "value_embeds",
    ("bigram_embedding", "how many buckets"): "bigram bigram_hash bigram_vocab_size",
    ("moe", EXPERTS): "experts moe_num_experts moe_top_k n_expert n_expert_per_token n_experts n_routed_experts "
    "num_active_experts num_experts num_experts_per_tok num_local_experts num_moe_experts num_selected_experts top_k",
    ("emb_dim", ""): "dim embed_dim n_embed",
    ("vocab_size", ""): "vocab",
}
_SHAPE |= {name: ours for ours, names in _LEVERS.items() for name in names.split()}

COUNTERPARTS = {name: Counterpart(TRAIN, *ours) for name, ours in _TRAINING.items()}
COUNTERPARTS |= {name: Counterpart(MODEL, *ours) for name, ours in _SHAPE.items()}

_TRACKER = "there is no tracker here: metrics.jsonl holds every number; remove it"
_DEVICE = "not a setting here: nccl on GPUs, gloo on CPUs, and as many devices as processes; remove it"
_FOLDER = "not a setting here: results go to the run's own folder; remove it"
_FIXED = "not a setting here: it is GPT-2's; remove it"
_CONTINUING = "not a setting here: the same command continues a run, and CHECKPOINT names another one; remove it"
_LINKS = "not a setting here: every checkpoint is kept unless keep_checkpoints is set, and `best` is a link; remove it"
_COUPLED = "not a setting here: validation_interval, checkpoint_interval and report_interval decide; remove it"
_RECOMPUTED = "not a setting here: activation_checkpointing recomputes each block; remove it"

# What has no key here, and why.
WITHOUT_KEY = {
    "lore": "low-rank embeddings are not available here; remove it",
    **dict.fromkeys(("wandb", "wandb_log", "wandb_project", "wandb_run_name", "report_to", "run_name"), _TRACKER),
    **dict.fromkeys(("tensorboard", "logging_dir"), _TRACKER),
    **dict.fromkeys(("backend", "ddp_backend", "device", "local_rank", "n_gpu", "no_cuda", "use_cpu"), _DEVICE),
    **dict.fromkeys(("out_dir", "output_dir", "overwrite_output_dir"), _FOLDER),
    **dict.fromkeys(("initializer_range", "layer_norm_epsilon", "layer_norm_eps", "scale_attn_weights"), _FIXED),
    "rms_norm_eps": _FIXED,
    "rope_scaling": "not a setting here: rope is not stretched beyond context_length; remove it",
    "aspect_ratio": 'not a setting here: 64 for each layer of "depth"; or give emb_dim, n_heads and n_layers',
    **dict.fromkeys(("resume", "resume_from_checkpoint", "resume_from_step"), _CONTINUING),
    **dict.fromkeys(("always_save_checkpoint", "load_best_model_at_end", "save_only_model"), _LINKS),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy", "save_strategy", "logging_strategy"), _COUPLED),
    **dict.fromkeys(("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"), _RECOMPUTED),
    "eval_accumulation_steps": "not a setting here: validation keeps no predictions; remove it",
    "model": "not a setting here: model.json is the model's shape, and the run's folder its name; remove it",
    "data_seed": "not a setting here: tokens are taken in their order; prepare_datasets.py shuffles; remove it",
    "lr_decay_iters": "not a setting here: the schedule ends with the run; remove it",
    "eval_only": "not a setting here: test_loss.py measures a checkpoint's loss; remove it",
    "auto_find_batch_size": "not a setting here: ddp_train.py -f finds the largest microbatch; remove it",
    "push_to_hub": "not a setting here: convert_hf.py publish uploads a trained model; remove it",
    **dict.fromkeys(("bos_token_id", "eos_token_id"), "not a setting here: the dataset's meta.json has its eot_token"),
    **dict.fromkeys(("architectures", "model_type"), "not a setting here: convert_hf.py import reads GPT-2 models"),
}


def advice(key: str, file: str) -> tuple[str | None, str] | None:
    """What to say of another program's `key` in our `file`: our key if it belongs in that file, and the words.

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
