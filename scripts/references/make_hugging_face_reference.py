#!/usr/bin/env python3
"""Makes tests/models/reference/hugging_face/FAMILY/: tiny models of public families as transformers saves them
(config.json, model.safetensors or shards of it), and in expected.safetensors what transformers makes of them.

All weights are random, and exact in fp32; norms' gains are near 1. expected.safetensors holds `tokens` and
`labels` (int32 [2, 12]; -100: none is learned; encoders' `token_types` too, of the loss, and of pairs of texts `sentence_labels`), `logits`, `loss` (the mean of the
labels that are not -100; of families with experts the balance loss too, where output_router_logits asks for it)
and `grad.NAME` for every weight, in fp32, computed in double. An encoder's tokens stand in front of its decoder's, of
which alone there are logits, `spans.tokens`, `spans.labels` and `spans.loss` are of spans that were cut out, `padded_loss` is that of a second row of which the encoder sees 4 tokens, and `generated` (int32 [2, 6]) is what generate() answers the encoder's, likeliest tokens each.

Between them the families have: tied and untied heads, grouped queries, biases on Q, K, V alone, heads of another
size than hidden/heads with norms of queries and keys, norms behind a block's parts and gains of 1 + weight, scaled
embeddings and multipliers, layers without rotary positions, positions of part of a head in pairs of neighbours, a sliding window shorter than the sequence, in all layers or
in some, capped scores, sinks, latent attention, experts that one tensor stacks, in groups, beside shared ones, and picked by
corrected scores, linear attention beside gated attention, biases of attention alone, rope scaling `linear`, `llama3` and `yarn`,
in the older and the newer form of config.json, shards, bf16 and fp16 files.

Needs torch, transformers and safetensors; nothing that Sherd builds, tests or runs needs this file.
Usage: make_hugging_face_reference.py [OUTPUT_FOLDER [FAMILY...]]
"""
import copy
import json
import pathlib
import shutil
import sys

import safetensors.torch
import torch
import transformers

from make_moe_reference import InDouble
from make_reference import is_gain

SHARED = dict(vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=24,
              use_cache=False)
LLAMA = dict(SHARED, intermediate_size=20, num_key_value_heads=2)
LATENT = dict(SHARED, rms_norm_eps=1e-3, intermediate_size=20, num_key_value_heads=4, kv_lora_rank=10, qk_nope_head_dim=6,
              qk_rope_head_dim=4)
GROUPED = dict(n_routed_experts=6, n_group=3, topk_group=2, num_experts_per_tok=2, moe_intermediate_size=10,
               first_k_dense_replace=1)
HYBRID = dict(head_dim=8, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
              linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=5)
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
SOURCE = 6  # tokens of an encoder in front of a decoder, which has as many
BOTH = dict(vocab_size=37, d_model=16, d_kv=6, d_ff=20, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
            relative_attention_max_distance=10, dropout_rate=0, n_positions=SOURCE, decoder_start_token_id=0,
            use_cache=False)
FAMILIES = {
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config(
        vocab_size=37, n_embd=16, n_layer=2, n_head=4, n_positions=24, n_inner=20, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0), {}),
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(
        **LLAMA, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 8}),
              {"max_shard_size": "8KB"}),
    "llama_linear": (transformers.LlamaForCausalLM, transformers.LlamaConfig(
        **LLAMA, tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), {}),
    "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig(
        **LLAMA, sliding_window=5, rope_parameters=DEFAULT_ROPE), {}),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config(
        **LLAMA, tie_word_embeddings=True, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                         "original_max_position_embeddings": 8}), {}),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(
        **LLAMA, head_dim=6, use_sliding_window=True, sliding_window=5, max_window_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}), {}),
    "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig(
        **LLAMA, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, output_router_logits=True,
        router_aux_loss_coef=0.02, rope_parameters=DEFAULT_ROPE), {}),
    "qwen3_moe": (transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(
        **LLAMA, head_dim=6, moe_intermediate_size=10, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
        mlp_only_layers=[0], rope_parameters=DEFAULT_ROPE), {}),
    "phi3": (transformers.Phi3ForCausalLM, transformers.Phi3Config(
        **LLAMA, sliding_window=5, rope_parameters=DEFAULT_ROPE, pad_token_id=None), {}),
    "phi3_long": (transformers.Phi3ForCausalLM, transformers.Phi3Config(
        **LLAMA, pad_token_id=None, partial_rotary_factor=1.0, original_max_position_embeddings=8,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5],
                         "long_factor": [1.25, 4.0], "original_max_position_embeddings": 8}), {}),
    "gemma3_text": (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(
        **LLAMA, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=16, bos_token_id=None, eos_token_id=None,
        rope_parameters={"sliding_attention": dict(DEFAULT_ROPE),
                         "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}), {}),
    "granite": (transformers.GraniteForCausalLM, transformers.GraniteConfig(
        **LLAMA, embedding_multiplier=3.0, residual_multiplier=0.22, attention_multiplier=0.3, logits_scaling=4.0,
        rope_parameters=dict(DEFAULT_ROPE)), {}),
    "smollm3": (transformers.SmolLM3ForCausalLM, transformers.SmolLM3Config(
        **LLAMA, no_rope_layer_interval=2, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 2e6}), {}),
    "glm4": (transformers.Glm4ForCausalLM, transformers.Glm4Config(
        **LLAMA, head_dim=8, pad_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}), {}),
    "ministral3": (transformers.Ministral3ForCausalLM, transformers.Ministral3Config(
        **LLAMA, head_dim=6, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 6.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4, "beta_fast": 32.0, "beta_slow": 1.0,
                         "llama_4_scaling_beta": 0.3}), {}),
    "olmo2": (transformers.Olmo2ForCausalLM, transformers.Olmo2Config(
        **LLAMA, pad_token_id=None, bos_token_id=None, eos_token_id=None, rope_parameters=dict(DEFAULT_ROPE)), {}),
    "olmo3": (transformers.Olmo3ForCausalLM, transformers.Olmo3Config(
        **LLAMA, pad_token_id=None, bos_token_id=None, eos_token_id=None, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": dict(DEFAULT_ROPE),
                         "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 6.0,
                                            "original_max_position_embeddings": 4}}), {}),
    "bert": (transformers.BertForMaskedLM, transformers.BertConfig(
        **SHARED, intermediate_size=20, hidden_dropout_prob=0, attention_probs_dropout_prob=0, pad_token_id=None), {}),
    "modernbert": (transformers.ModernBertForMaskedLM, transformers.ModernBertConfig(
        **SHARED, intermediate_size=20, local_attention=6, layer_types=["full_attention", "sliding_attention"],
        pad_token_id=None, bos_token_id=None, eos_token_id=None, cls_token_id=None, sep_token_id=None), {}),
    "bert_classifier": (transformers.BertForSequenceClassification, transformers.BertConfig(
        **SHARED, intermediate_size=20, hidden_dropout_prob=0, attention_probs_dropout_prob=0, pad_token_id=None,
        id2label={0: "bad", 1: "fair", 2: "good"}), {}),
    "modernbert_classifier": (transformers.ModernBertForSequenceClassification, transformers.ModernBertConfig(
        **SHARED, intermediate_size=20, local_attention=6, layer_types=["full_attention", "sliding_attention"],
        pad_token_id=None, bos_token_id=None, eos_token_id=None, cls_token_id=None, sep_token_id=None,
        id2label={0: "bad", 1: "fair", 2: "good"}), {}),
    "gemma2": (transformers.Gemma2ForCausalLM, transformers.Gemma2Config(
        **LLAMA, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=16, attn_logit_softcapping=0.2, final_logit_softcapping=0.5, bos_token_id=None,
        eos_token_id=None, pad_token_id=None, rope_parameters=dict(DEFAULT_ROPE)), {}),
    "gpt_oss": (transformers.GptOssForCausalLM, transformers.GptOssConfig(
        **dict(LLAMA, intermediate_size=10), head_dim=6, num_local_experts=4, num_experts_per_tok=2, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=None, bos_token_id=None, eos_token_id=None,
        output_router_logits=True, router_aux_loss_coef=0.02,
        rope_parameters={"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                         "truncate": False, "original_max_position_embeddings": 8}), {}),
    "llama_biases": (transformers.LlamaForCausalLM, transformers.LlamaConfig(
        **LLAMA, attention_bias=True, rope_parameters=dict(DEFAULT_ROPE)), {}),
    "deepseek_v2": (transformers.DeepseekV2ForCausalLM, transformers.DeepseekV2Config(
        **LATENT, **dict(GROUPED, topk_group=1), q_lora_rank=12, v_head_dim=8, topk_method="group_limited_greedy", n_shared_experts=2,
        routed_scaling_factor=1.5, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7,
                         "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 8}), {}),
    "deepseek_v2_lite": (transformers.DeepseekV2ForCausalLM, transformers.DeepseekV2Config(
        **LATENT, q_lora_rank=None, v_head_dim=10, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=10,
        first_k_dense_replace=1, n_shared_experts=1, bos_token_id=None, eos_token_id=None,
        rope_parameters=dict(DEFAULT_ROPE)), {}),
    "deepseek_v3": (transformers.DeepseekV3ForCausalLM, transformers.DeepseekV3Config(
        **LATENT, **GROUPED, q_lora_rank=12, v_head_dim=8, num_mtp_layers=0, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 8}), {}),
    "glm4_moe": (transformers.Glm4MoeForCausalLM, transformers.Glm4MoeConfig(
        **LLAMA, **GROUPED, head_dim=8, attention_bias=True, use_qk_norm=True, routed_scaling_factor=1.5,
        num_mtp_layers=0, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
                 {}),
    "qwen2_moe": (transformers.Qwen2MoeForCausalLM, transformers.Qwen2MoeConfig(
        **LLAMA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=10, shared_expert_intermediate_size=20,
        mlp_only_layers=[0], rope_parameters=dict(DEFAULT_ROPE)), {}),
    "qwen3_next": (transformers.Qwen3NextForCausalLM, transformers.Qwen3NextConfig(
        **LLAMA, **HYBRID, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=10,
        shared_expert_intermediate_size=10, rope_parameters=dict(DEFAULT_ROPE, partial_rotary_factor=0.5)), {}),
    "qwen3_5": (transformers.Qwen3_5ForCausalLM, transformers.Qwen3_5TextConfig(
        **LLAMA, **HYBRID, rope_parameters=dict(DEFAULT_ROPE, partial_rotary_factor=0.5, mrope_interleaved=True,
                                                mrope_section=[1, 1, 0])), {}),
    "qwen3_5_moe": (transformers.Qwen3_5MoeForCausalLM, transformers.Qwen3_5MoeTextConfig(
        **{k: v for k, v in LLAMA.items() if k != "intermediate_size"}, **HYBRID, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=10, shared_expert_intermediate_size=10,
        rope_parameters=dict(DEFAULT_ROPE, partial_rotary_factor=0.5, mrope_interleaved=True, mrope_section=[1, 1, 0])),
                    {}),
    "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config(**BOTH), {}),
    "t5_gated": (transformers.T5ForConditionalGeneration, transformers.T5Config(
        **BOTH, num_decoder_layers=3, feed_forward_proj="gated-gelu", tie_word_embeddings=False), {}),
    "mt5": (transformers.MT5ForConditionalGeneration, transformers.MT5Config(**BOTH), {}),
    "bert_tokens": (transformers.BertForTokenClassification, transformers.BertConfig(
        **SHARED, intermediate_size=20, hidden_dropout_prob=0, attention_probs_dropout_prob=0, pad_token_id=None,
        id2label={0: "O", 1: "B-PER", 2: "I-PER"}), {}),
    "modernbert_tokens": (transformers.ModernBertForTokenClassification, transformers.ModernBertConfig(
        **SHARED, intermediate_size=20, local_attention=6, layer_types=["full_attention", "sliding_attention"],
        pad_token_id=None, bos_token_id=None, eos_token_id=None, cls_token_id=None, sep_token_id=None,
        id2label={0: "O", 1: "B-PER", 2: "I-PER"}), {}),
    "bert_pretraining": (transformers.BertForPreTraining, transformers.BertConfig(
        **SHARED, intermediate_size=20, hidden_dropout_prob=0, attention_probs_dropout_prob=0, pad_token_id=None), {}),
}
# As transformers 4 wrote config.json.
OLDER = ("mistral", "llama", "qwen3", "mixtral", "phi3", "granite", "smollm3", "deepseek_v3")


def family_is_untied(config):
    """Published files of T5 1.1 and mT5 have a head of their own, whatever the class ties."""
    return config.model_type == "mt5" or not config.scale_decoder_outputs


def made(kind, config, seed):
    torch.manual_seed(seed)
    config._attn_implementation = config._experts_implementation = "eager"
    model = kind(config).eval()
    if config.is_encoder_decoder and family_is_untied(config):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape)
            sharp = name.endswith(("mlp.gate.weight", "mlp.router.weight", "sinks"))
            scale = 0.5 if "conv1d" in name else 0.4 if sharp else 0.05 if name.endswith("bias") else 0.15
            # which multiply by 1 + weight
            gain = 0 if config.model_type.startswith(("gemma", "qwen3_next", "qwen3_5")) and "linear" not in name else 1
            p.copy_(gain + 0.1 * noise if is_gain(name) else scale * noise)
        for name, state in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                state.copy_(0.2 * torch.randn(state.shape))
    return model


def as_saved(model, values, folder):
    """What save_pretrained writes of a copy of the model with these values, by published names."""
    of = copy.deepcopy(model).float()
    with torch.no_grad():
        for p, value in zip(of.parameters(), values):
            p.copy_(value)
    scratch = folder / "scratch"
    of.save_pretrained(scratch)
    out = safetensors.torch.load_file(scratch / "model.safetensors")
    shutil.rmtree(scratch)
    return out


def in_double(model):
    wide = copy.deepcopy(model).double()
    if not hasattr(wide, "model"):
        return wide  # learned positions
    rotary, parameters = wide.model.rotary_emb, model.config.rope_parameters
    nested = "rope_type" not in parameters  # a section for each type of layers
    with InDouble():
        for layer_type in parameters if nested else (None,):
            kind = (parameters[layer_type] if nested else parameters)["rope_type"]
            options = {"layer_type": layer_type} if nested else {}
            frequencies, scaling = \
                rotary.compute_default_rope_parameters(model.config, **options) if kind == "default" else \
                transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](model.config, torch.device("cpu"), **options)
            if kind == "longrope":  # of sequences longer than the first length, as these are
                frequencies, scaling = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](
                    model.config, torch.device("cpu"), seq_len=12)
                rotary.long_inv_freq = frequencies
            prefix = f"{layer_type}_" if nested else ""
            setattr(rotary, prefix + "inv_freq", frequencies)
            setattr(rotary, prefix + "attention_scaling", scaling)
    return wide


def older_config(folder):
    """rope_theta and rope_scaling in place of rope_parameters, torch_dtype in place of dtype."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2) + "\n")


def options_of(kind):
    return {} if "Bert" in kind.__name__ else {"use_cache": False}


def run(model, tokens, **more):
    """Of an encoder and a decoder what the latter gives for its own tokens, behind the former's."""
    if model.config.is_encoder_decoder:
        return model(tokens[:, :SOURCE], decoder_input_ids=tokens[:, SOURCE:], use_cache=False)
    result = model(tokens, **more, **options_of(type(model)))
    if hasattr(result, "prediction_logits"):
        result.logits = result.prediction_logits
    return result


def make(family, kind, config, options, root):
    folder = root / family
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = made(kind, config, 30 + list(FAMILIES).index(family))
    torch.manual_seed(5)
    text = torch.randint(0, 37, (2, 13))
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].clone()
    types = (torch.arange(24).view(2, 12) % 12 > 7).long() if hasattr(config, "type_vocab_size") else None
    pairs = torch.tensor([1, 0]) if "PreTraining" in kind.__name__ else None
    classes = torch.tensor([2, 0]) if "SequenceClassification" in kind.__name__ else None
    if classes is not None:  # of a text, at its first token
        labels = torch.full_like(labels, -100)
        labels[:, 0] = classes
    elif config.is_encoder_decoder:
        tokens[:, SOURCE] = 0
        labels[:, :SOURCE] = labels[0, -2:] = -100
    else:
        if "TokenClassification" in kind.__name__:
            labels %= config.num_labels
        labels[0, 3:8] = labels[1, -1] = -100  # micro-batches of one row have different numbers of targets
    wide = in_double(model)
    with InDouble():
        result = run(wide, tokens)
        wanted = labels[:, -result.logits.shape[1]:].reshape(-1) if classes is None else classes
        loss = torch.nn.functional.cross_entropy(result.logits.view(len(wanted), -1), wanted, ignore_index=-100)
        if types is not None:  # of the logits all tokens are of the first type
            typed = run(wide, tokens, token_type_ids=types)
            loss = torch.nn.functional.cross_entropy(typed.logits.view(len(wanted), -1), wanted, ignore_index=-100)
        if pairs is not None:
            loss = wide(tokens, token_type_ids=types, labels=labels, next_sentence_label=pairs).loss
        if getattr(result, "aux_loss", None) is not None:
            loss = loss + config.router_aux_loss_coef * result.aux_loss
    loss.backward()
    grads = as_saved(model, [torch.zeros_like(p) if p.grad is None else p.grad.float() for p in wide.parameters()],
                     folder)
    expected = {"tokens": tokens.int(), "labels": labels.int(), "logits": result.logits.detach().float(),
                "loss": loss.detach().float().reshape(1)}
    if types is not None:
        expected["token_types"] = types.int()
    if pairs is not None:  # at the first token of each
        expected["sentence_labels"] = torch.full_like(labels, -100).int()
        expected["sentence_labels"][:, 0] = pairs
    if config.is_encoder_decoder:
        seen = torch.tensor([[1] * SOURCE, [1] * 4 + [0] * (SOURCE - 4)])
        with torch.no_grad(), InDouble():
            padded = wide(tokens[:, :SOURCE], attention_mask=seen, decoder_input_ids=tokens[:, SOURCE:], use_cache=False)
        expected["padded_loss"] = torch.nn.functional.cross_entropy(
            padded.logits.view(len(wanted), -1), wanted, ignore_index=-100).float().reshape(1)
        # Two texts of which tests/models/hugging_face_families_test.cpp cuts a span each, and fills their rows up.
        spans = torch.tensor([[2, 5, 8, 11, 36, 1, 0, 36, 14, 17, 0, 0], [9, 12, 15, 18, 36, 1, 0, 36, 21, 24, 0, 0]])
        cut = torch.tensor([[36, 14, 17, 1, -100, -100], [36, 21, 24, 1, -100, -100]])
        with torch.no_grad(), InDouble():
            found = wide(input_ids=spans[:, :SOURCE], labels=cut, use_cache=False)
        expected.update({"spans.tokens": spans.int(), "spans.loss": found.loss.float().reshape(1),
                         "spans.labels": torch.cat([torch.full((2, SOURCE), -100), cut], 1).int()})
        model.generation_config.eos_token_id = None
        # transformers 5.24 takes the encoder's number of layers for its cache
        expected["generated"] = model.generate(
            tokens[:, :SOURCE], do_sample=False, max_new_tokens=SOURCE, decoder_start_token_id=0,
            use_cache=config.num_decoder_layers == config.num_layers)[:, 1:].int().contiguous()
    expected.update({f"grad.{name}": value.contiguous() for name, value in grads.items()})
    safetensors.torch.save_file(expected, folder / "expected.safetensors")
    model.save_pretrained(folder, **options)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if family in OLDER:
        older_config(folder)
    single = run(kind.from_pretrained(folder, config=config), tokens).logits
    difference = (single.double() - result.logits).abs().max().item()
    assert difference < 1e-5, (family, difference)
    print(f"{family}: loss {loss.item():.6f}, single precision {difference:.1e}, "
          f"{sum(f.stat().st_size for f in folder.iterdir())} bytes")


def make_mxfp4(root):
    """A model of GPT-OSS whose experts are in MXFP4, of all codes and many scales; expected.safetensors holds as
    value.NAME what transformers decodes."""
    from transformers.integrations import mxfp4
    folder = root / "gpt_oss_mxfp4"
    shutil.rmtree(folder, ignore_errors=True)
    config = transformers.GptOssConfig(
        vocab_size=37, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_local_experts=2, num_experts_per_tok=2, max_position_embeddings=24,
        pad_token_id=None, bos_token_id=None, eos_token_id=None, use_cache=False)
    made(transformers.GptOssForCausalLM, config, 77).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    torch.manual_seed(78)
    expected = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, out = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, out, inner // 32, 16), dtype=torch.uint8)
        scales = torch.randint(97, 157, (experts, out, inner // 32), dtype=torch.uint8)
        scales[0, 0, 0], scales[-1, -1, -1] = 2, 251  # numbers of fp32 at either end
        tensors[name + "_blocks"], tensors[name + "_scales"] = blocks, scales
        expected["value." + name] = mxfp4._convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    safetensors.torch.save_file(expected, folder / "expected.safetensors")
    path = folder / "config.json"
    published = json.loads(path.read_text())
    published["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    path.write_text(json.dumps(published, indent=2) + "\n")
    print(f"gpt_oss_mxfp4: {sum(f.stat().st_size for f in folder.iterdir())} bytes")


def make_fp8(root):
    """A model of DeepSeek-V3 whose matrices are in FP8 (E4M3) with a scale for 128 x 128 weights, of all codes that are
    numbers; expected.safetensors holds as value.NAME what torch decodes."""
    folder = root / "deepseek_v3_fp8"
    shutil.rmtree(folder, ignore_errors=True)
    config = transformers.DeepseekV3Config(
        **dict(LATENT, intermediate_size=136), **dict(GROUPED, n_routed_experts=2, n_group=1, topk_group=1), q_lora_rank=None, v_head_dim=10,
        num_mtp_layers=0, bos_token_id=None, eos_token_id=None, rope_parameters=dict(DEFAULT_ROPE))
    made(transformers.DeepseekV3ForCausalLM, config, 79).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    torch.manual_seed(80)
    expected = {}
    for name in [name for name in tensors if name.endswith("proj.weight") or "kv_a_proj" in name or "kv_b_proj" in name]:
        rows, columns = tensors[name].shape
        codes = torch.randperm(rows * columns).to(torch.uint8).view(rows, columns)
        codes[codes & 127 == 127] = 128  # NaN
        scales = torch.rand(-(-rows // 128), -(-columns // 128)) * 1e-3 + 1e-4
        values = codes.view(torch.float8_e4m3fn)
        spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        expected["value." + name] = (values.float() * spread).contiguous()
        tensors[name], tensors[name + "_scale_inv"] = values, scales
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    safetensors.torch.save_file(expected, folder / "expected.safetensors")
    path = folder / "config.json"
    published = json.loads(path.read_text())
    published["quantization_config"] = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                        "weight_block_size": [128, 128]}
    path.write_text(json.dumps(published, indent=2) + "\n")
    print(f"deepseek_v3_fp8: {sum(f.stat().st_size for f in folder.iterdir())} bytes")


def make_bitsandbytes(root, name, kind, config, seed, **how):
    """A model as transformers and bitsandbytes save it in few bits; expected.safetensors holds as value.NAME what
    bitsandbytes decodes."""
    import bitsandbytes
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    folder, plain = root / name, root / (name + "_plain")
    shutil.rmtree(folder, ignore_errors=True)
    made(kind, config, seed).float().save_pretrained(plain)
    model = kind.from_pretrained(plain, dtype=torch.float32, device_map="cpu",
                                 quantization_config=transformers.BitsAndBytesConfig(**how))
    shutil.rmtree(plain)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    expected = {}
    for path, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.weight.quant_state
            scales = state.absmax
            if state.nested:
                scales = bitsandbytes.functional.dequantize_blockwise(scales, state.state2) + state.offset
            # Its kernel for processors takes blocks to end with rows, which those of small matrices do not.
            value = _dequantize_4bit_compute(module.weight.data.reshape(-1), scales, state.code, state.blocksize,
                                             state.shape, torch.float32)
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            value = bitsandbytes.functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
        else:
            continue
        turned = kind is transformers.GPT2LMHeadModel and path != "lm_head"
        expected[f"value.{path}.weight"] = (value.T if turned else value).float().contiguous()
    torch.manual_seed(seed + 100)
    expected.update(tokens=torch.randint(37, (2, 12)).int(), labels=torch.randint(37, (2, 12)).int())
    safetensors.torch.save_file(expected, folder / "expected.safetensors")
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)
    print(f"{name}: {sum(f.stat().st_size for f in folder.iterdir())} bytes")


def make_all_bitsandbytes(root):
    def llama(width, inner):
        return transformers.LlamaConfig(vocab_size=37, hidden_size=width, intermediate_size=inner, num_hidden_layers=1,
                                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=24,
                                        pad_token_id=None, bos_token_id=None, eos_token_id=None)

    gpt2 = transformers.GPT2Config(vocab_size=37, n_embd=24, n_layer=1, n_head=4, n_positions=24, pad_token_id=None,
                                   bos_token_id=None, eos_token_id=None)
    make_bitsandbytes(root, "llama_nf4", transformers.LlamaForCausalLM, llama(64, 128), 81, load_in_4bit=True,
                      bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32)
    make_bitsandbytes(root, "gpt2_fp4", transformers.GPT2LMHeadModel, gpt2, 82, load_in_4bit=True,
                      bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.float32)
    make_bitsandbytes(root, "llama_int8", transformers.LlamaForCausalLM, llama(32, 48), 83, load_in_8bit=True)


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else
                        pathlib.Path(__file__).resolve().parents[2] / "tests/models/reference/hugging_face")
    for family, (kind, config, options) in FAMILIES.items():
        if sys.argv[2:] and family not in sys.argv[2:]:
            continue
        make(family, kind, config, options, root)
    for family, make_it in (("gpt_oss_mxfp4", make_mxfp4), ("deepseek_v3_fp8", make_fp8)):
        if not sys.argv[2:] or family in sys.argv[2:]:
            make_it(root)
    if not sys.argv[2:] or "bitsandbytes" in sys.argv[2:]:
        make_all_bitsandbytes(root)


if __name__ == "__main__":
    main()
