"""Models of published runs, as sections `model` of a configuration."""


def gpt(hidden, layers, heads, vocabulary=51200, sequence=2048, **more):
    return dict(type="gpt2", hidden_size=hidden, num_layers=layers, num_heads=heads, vocab_size=vocabulary,
                seq_length=sequence, **more)


def llama(hidden, layers, heads, groups, inner, vocabulary=128256, **more):
    return {"type": "llama", "hidden_size": hidden, "num_layers": layers, "num_heads": heads, "num_kv_heads": groups,
            "head_dim": 128, "ffn_hidden_size": inner, "vocab_size": vocabulary, **more}


def qwen2(hidden, layers, heads, groups, inner, tied, head=128):
    return llama(hidden, layers, heads, groups, inner, 151936 if tied else 152064, type="qwen2", head_dim=head,
                 tie_embeddings=tied)


def qwen3_moe(hidden, layers, heads, inner):
    return llama(hidden, layers, heads, 4, inner, 151936, type="qwen3_moe",
                 moe=dict(experts=128, top_k=8, ffn_hidden_size=inner))


def deepseek(hidden, layers, heads, inner, vocabulary, queries, moe, version=3):
    mla = {"kv_lora_rank": 512, **({"q_lora_rank": queries} if queries else {})}
    return dict(type=f"deepseek_v{version}", hidden_size=hidden, num_layers=layers, num_heads=heads, mla=mla, moe=moe,
                ffn_hidden_size=inner, vocab_size=vocabulary, tie_embeddings=False)


def deepseek_v3(layers, dense):
    return deepseek(7168, layers, 128, 18432, 129280, 1536,
                    dict(experts=256, top_k=8, ffn_hidden_size=2048, first_dense=dense, shared_experts=1, groups=8,
                         top_groups=4))


def gpt_oss(layers, experts):
    return dict(type="gpt_oss", hidden_size=2880, num_layers=layers, num_heads=64, num_kv_heads=8, head_dim=64,
                vocab_size=201088, sliding_window=128, layer_types=["sliding_attention", "full_attention"],
                moe=dict(experts=experts, top_k=4, ffn_hidden_size=2880))


def with_next_token(model):
    """DeepSeek-V3's prediction of one token more, which Sherd does not have: a block and a head more. Megatron Bridge's
    speeds in FLOP/s say that its runs have it: 260e9 for a token, 250e9 without."""
    return dict(model, num_layers=model["num_layers"] + 1, vocab_size=2 * model["vocab_size"])


NAMED = {
    "llama3 8b": llama(4096, 32, 32, 8, 14336), "llama3 70b": llama(8192, 80, 64, 8, 28672),
    "llama3.1 405b": llama(16384, 126, 128, 8, 53248), "qwen3 30b a3b": qwen3_moe(2048, 48, 32, 768),
    "qwen3 235b a22b": qwen3_moe(4096, 94, 64, 1536), "llama3 70b cut to 12 layers": llama(8192, 12, 64, 8, 28672),
    "llama3 405b cut to 4 layers": llama(16384, 4, 128, 16, 53248),  # 16 groups in SimuMax's launcher, not 8
    "qwen2.5 0.5b": qwen2(896, 24, 14, 2, 4864, True, 64), "qwen2.5 1.5b": qwen2(1536, 28, 12, 2, 8960, True),
    "qwen2.5 3b": qwen2(2048, 36, 16, 2, 11008, True), "qwen2.5 7b": qwen2(3584, 28, 28, 4, 18944, False),
    "qwen2.5 14b": qwen2(5120, 48, 40, 8, 13824, False), "qwen2.5 32b": qwen2(5120, 64, 40, 8, 27648, False),
    "deepseekv3": deepseek_v3(61, 3),
    "deepseekv3 cut to 4 layers": deepseek_v3(4, 1),  # of SimuMax's layers one is dense
    "deepseekv2 cut to 4 layers": deepseek(5120, 4, 128, 12288, 102400, 1536,
                                           dict(experts=160, top_k=6, ffn_hidden_size=1536, first_dense=1,
                                                shared_experts=2, norm_topk=False), 2),
    "moonlight 16b a3b": deepseek(2048, 27, 16, 11264, 163840, 0,
                                  dict(experts=64, top_k=6, ffn_hidden_size=1408, first_dense=1, shared_experts=2)),
    "kimi k2": deepseek(7168, 61, 64, 18432, 163840, 1536,
                        dict(experts=384, top_k=8, ffn_hidden_size=2048, first_dense=1, shared_experts=1)),
    "gpt oss 20b": gpt_oss(24, 32), "gpt oss 120b": gpt_oss(36, 128)}
# What Sherd does not have.
UNLIKE = [("deepseekv4", "sparse attention"), ("nemotron", "Mamba")]
