#!/usr/bin/env python3
"""Trains tiny models on preferences with TRL's trainers and with `sherd train`, from the same weights, on the same
batches, in fp32, and compares of each step the loss, the gradient's norm and what people watch, and in the end the
weights. Ids are compared first: TRL makes them from the texts, as `sherd prepare` does. Here a text has a row of its
own, as in TRL; where a case is packed, too, a second run has several texts in each row, and the same batches.

Two things are arranged so that both can be compared. ORPO's prompts have one token, as its other loss in TRL is of
prompts, too. KTO's mismatched answers in TRL are of the same batch, and here lie half of the dataset further: TRL's
column of them is overwritten with these. Of the first step the accuracy is left out where the policy is the reference:
it would be one of rounding.

Columns of what is printed are largest differences: of losses, norms and metrics, by their own size where that is above
1; of weights, by how far the farthest one moved, which is the last column; and of losses and metrics between packed and
not.

Needs torch, transformers, datasets, peft and trl 1.16.
Usage: check_trl.py [--sherd build/sherd] [CASE...]
"""
import argparse
import json
import logging
import os
import pathlib
import random
import sys
import tempfile
import warnings

os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", TQDM_DISABLE="1")
warnings.filterwarnings("ignore")
import datasets  # noqa: E402
import numpy  # noqa: E402
import peft  # noqa: E402
import safetensors.torch  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from trl.experimental.cpo import CPOConfig, CPOTrainer  # noqa: E402
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # noqa: E402

from adapter_checks import ROOT, run  # noqa: E402

STEPS, PAIRS, PAIRS_OF_STEP, ROW = 4, 32, 8, 128
ADAM = {"lr": 2e-3, "eps": 1e-4}  # gradients far below eps hardly steer Adam, nor does their rounding
ALLOWED = {"loss": 1e-5, "norm": 1e-4, "metrics": 1e-4, "weights": 1e-3, "packed": 1e-6}
WORDS = [first + last for first in "b d f g k l m n p r s t v z".split() for last in "a e i o u an en in on un".split()]
SHAPE = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
LLAMA = (transformers.LlamaConfig, dict(SHAPE, intermediate_size=128, num_key_value_heads=2, max_position_embeddings=4096,
                                        tie_word_embeddings=False, initializer_range=0.08))
GPT2 = (transformers.GPT2Config, dict(n_embd=64, n_layer=2, n_head=4, n_positions=256, resid_pdrop=0, embd_pdrop=0,
                                      attn_pdrop=0, initializer_range=0.08))
LORA = dict(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0)


class Case:
    """`keys`: of training.preference, which TRL's arguments are called by, too, but for what `trl` says. `reference`: ours.
    `adapter`: "new", from PEFT's own beginning; "on", from one that does something already; "ours", from this program's
    beginning, and the reference is the model without it."""

    def __init__(self, objective="dpo", keys=None, trl=None, reference=None, model=LLAMA, adapter=None, packed=True,
                 prompt=(3, 8), whole=False, even=False):
        self.objective, self.keys, self.trl, self.reference = objective, keys or {}, trl or {}, reference
        self.model, self.adapter, self.packed, self.prompt = model, adapter, packed, prompt
        self.whole = whole  # each step has all of the data, which is one row where it is packed
        self.even = even  # both answers of a pair are of one length, so that what training changes orders pairs

    def has_reference(self):
        return self.objective in ("dpo", "kto")

    def preference(self):
        return {**self.keys, **({"reference": self.reference} if self.reference else {})}


def of_dpo(loss, **keys):
    return Case(keys={"loss_type": loss, **keys})


CASES = {
    "dpo": Case(trl={"precompute_ref_log_probs": True}),
    "dpo_copy": Case(reference="copy"),
    "dpo_gpt2": Case(model=GPT2, keys={"beta": 0.3}),
    "dpo_sft": Case(keys={"loss_type": ["sigmoid", "sft"], "loss_weights": [1, 0.3]}),
    "dpo_ld": Case(keys={"ld_alpha": 0.5}, reference="copy"),
    "dpo_ld_precomputed": Case(keys={"ld_alpha": 0.5}, trl={"precompute_ref_log_probs": True}),
    "dpo_lora": Case(adapter="new"),
    "dpo_lora_copy": Case(adapter="new", reference="copy"),
    "dpo_lora_on": Case(adapter="on"),
    "dpo_lora_switched": Case(adapter="ours", reference="adapter"),
    "dpo_lora_gpt2": Case(adapter="new", model=GPT2),
    "ipo": of_dpo("ipo"),
    "hinge": of_dpo("hinge"),
    "exo_pair": of_dpo("exo_pair", label_smoothing=0.001),
    "nca_pair": of_dpo("nca_pair"),
    "robust": of_dpo("robust", label_smoothing=0.1),
    "bco_pair": of_dpo("bco_pair"),
    "sppo_hard": of_dpo("sppo_hard"),
    "aot": Case(keys={"loss_type": "aot"}, even=True),
    "aot_unpaired": Case(keys={"loss_type": "aot_unpaired"}, even=True),
    "apo_zero": of_dpo("apo_zero"),
    "apo_down": of_dpo("apo_down"),
    "discopop": of_dpo("discopop"),
    "sigmoid_norm": of_dpo("sigmoid_norm"),
    "forward_kl": Case(keys={"f_divergence_type": "forward_kl"}),
    "js_divergence": Case(keys={"f_divergence_type": "js_divergence"}),
    "alpha_divergence": Case(keys={"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3}),
    "cpo": Case("cpo", {"cpo_alpha": 0.5}),
    "simpo": Case("simpo", {"beta": 2.0, "simpo_gamma": 0.5}, trl={"loss_type": "simpo", "cpo_alpha": 0}),
    "orpo": Case("orpo", {"beta": 0.2}, prompt=(1, 1)),
    "kto": Case("kto", {"desirable_weight": 1.2}, packed=False),
    "kto_whole": Case("kto", {"undesirable_weight": 0.8}, whole=True),
    "kto_apo": Case("kto", {"loss_type": "apo_zero_unpaired"}, packed=False),
    "kto_apo_copy": Case("kto", {"loss_type": "apo_zero_unpaired"}, reference="copy", packed=False),
    "kto_lora": Case("kto", adapter="ours", reference="adapter", packed=False),
    "reward": Case("reward"),
    "reward_centered": Case("reward", {"center_rewards_coefficient": 0.05}),
    "reward_gpt2": Case("reward", model=GPT2),
}


# ---- what both begin with ----

def make_tokenizer(folder):
    """Of bytes, and of each word, with the space before it, as one token."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1000, special_tokens=["<|end|>", "<|pad|>"], show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([word + " " + word for word in WORDS] * 3, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.save_pretrained(folder)
    return fast


def make_model(case, tokenizer, folder):
    config, sizes = case.model
    config = config(**sizes, vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
                    pad_token_id=tokenizer.pad_token_id, num_labels=1)
    torch.manual_seed(3)
    kind = transformers.AutoModelForSequenceClassification if case.objective == "reward" \
        else transformers.AutoModelForCausalLM
    kind.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return lambda: kind.from_pretrained(folder, dtype=torch.float32)


def words(draw, count):
    return " ".join(draw.choice(WORDS) for _ in range(count))


def make_pairs(case):
    """Pairs of such lengths that two of them that follow each other fill a row but for one place, as best fit packs them:
    the longer ones all have other lengths, above half a row."""
    draw = random.Random(5)
    longer = [ROW // 2 + 2 * i for i in range(1, PAIRS // 2 + 1)]
    draw.shuffle(longer)
    out = []
    for places in longer:
        both = [places, ROW - 1 - places]
        draw.shuffle(both)
        for all_places in both:  # both texts without their last tokens
            asked = draw.randint(*case.prompt)
            answers = all_places - 2 * asked
            chosen = answers // 2 if case.even else draw.randint(answers // 4, answers - answers // 4)
            out.append({"prompt": words(draw, asked), "chosen": " " + words(draw, chosen),
                        "rejected": " " + words(draw, answers - chosen)})
    return out


def lines_of(case):
    """What `sherd prepare` reads and TRL is given."""
    pairs = make_pairs(case)
    if case.objective != "kto":
        return pairs
    draw = random.Random(6)
    texts = [{"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
             for pair in pairs for side in ("chosen", "rejected")]
    draw.shuffle(texts)
    for text in texts:
        text["label"] ^= draw.random() < 0.2
    return texts


def make_adapter(case, model, folder):
    """PEFT's files, which both begin with."""
    torch.manual_seed(7)
    out = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    if case.adapter == "on":
        for name, parameter in out.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    out.save_pretrained(folder)


# ---- TRL ----

class Mismatched(trl.KTOTrainer):
    """With the answers of others beside each prompt that `sherd train` sets there."""

    def _prepare_dataset(self, *arguments):
        dataset = super()._prepare_dataset(*arguments)
        if "KL_completion_ids" not in dataset.column_names:
            return dataset
        answers = list(dataset["completion_ids"])
        half = len(answers) // 2
        return dataset.remove_columns("KL_completion_ids").add_column("KL_completion_ids", answers[half:] + answers[:half])


TRAINERS = {"dpo": (trl.DPOTrainer, trl.DPOConfig), "kto": (Mismatched, trl.KTOConfig),
            "reward": (trl.RewardTrainer, trl.RewardConfig), "cpo": (CPOTrainer, CPOConfig),
            "simpo": (CPOTrainer, CPOConfig), "orpo": (ORPOTrainer, ORPOConfig)}
# What RewardTrainer calls them.
REWARD_NAMES = {"accuracy": "rewards/accuracies", "margin": "rewards/margins", "mean_reward": "rewards/mean"}


def ids_of(dataset):
    """Those of the texts, one behind the other, and which are answers, where the trainer tells."""
    ids, answers = [], []

    def add(prompt, answer):
        ids.extend(prompt + answer)
        answers.extend([0] * len(prompt) + [1] * len(answer))

    for row in dataset:
        if "completion_ids" in row:
            add(row["prompt_ids"], row["completion_ids"])
            continue
        for side in ("chosen", "rejected"):
            if f"{side}_labels" in row:  # of CPO and ORPO
                prompt = row[f"{side}_labels"].count(-100)
                add(row[f"{side}_input_ids"][:prompt], row[f"{side}_input_ids"][prompt:])
            else:
                add(row.get("prompt_ids", []), row[f"{side}_ids"])
    return ids, answers


def train_trl(case, lines, tokenizer, load, adapter, scratch):
    """Its steps, its weights, and its dataset."""
    trainer_class, config_class = TRAINERS[case.objective]
    texts = len(lines) // STEPS if not case.whole else len(lines)
    config = config_class(
        output_dir=str(scratch / "trl"), per_device_train_batch_size=texts, max_steps=STEPS, optim="adamw_torch",
        learning_rate=ADAM["lr"], adam_epsilon=ADAM["eps"], weight_decay=0, lr_scheduler_type="constant", max_grad_norm=0,
        bf16=False, gradient_checkpointing=False, train_sampling_strategy="sequential", logging_steps=1, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, **{**case.keys, **case.trl})
    how = {}
    model = load()
    if case.adapter == "on":
        model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    elif case.adapter:
        how["peft_config"] = peft.LoraConfig(**LORA)
    trainer = trainer_class(model=model, args=config, train_dataset=datasets.Dataset.from_list(lines),
                            processing_class=tokenizer, **how)
    if how:
        peft.set_peft_model_state_dict(trainer.model, peft.load_peft_weights(str(adapter)))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    steps = [{REWARD_NAMES.get(name, name): value for name, value in each.items()}
             for each in trainer.state.log_history if "loss" in each]
    weights = peft.get_peft_model_state_dict(trainer.model) if case.adapter else trainer.model.state_dict()
    return steps, weights, trainer.train_dataset


# ---- Sherd ----

def settings_of(case, base, adapter, scratch, packed):
    """Rows of one text, chosen and rejected in turns, or rows of several."""
    texts = 2 * PAIRS // (1 if case.whole else STEPS)
    rows = texts
    if packed:
        rows = 1 if case.whole else PAIRS_OF_STEP // 2
    length = ROW
    if packed and case.whole:
        length = 4096
    elif packed and case.objective == "reward":
        length = ROW + 4  # the last tokens of four texts
    training = {"steps": STEPS, "objective": case.objective, "preference": case.preference(), "init_from": str(base),
                "save_dir": str(scratch / f"run_{packed}")}
    if case.adapter in ("new", "on"):
        training["adapter"] = {"init_from": str(adapter)}
    elif case.adapter:
        training["adapter"] = {"type": "lora", "rank": LORA["r"], "alpha": LORA["lora_alpha"], "targets": "all-linear"}
    return {"train_batch_size": rows, "train_micro_batch_size_per_gpu": rows, "gradient_clipping": 0,
            "optimizer": {"type": "AdamW", "params": {**ADAM, "weight_decay": 0}}, "model": {"seq_length": length},
            "data": {"path": str(scratch / "data"), "packing": "documents" if packed else "stream", "shuffle": False,
                     "split": [1, 0]},
            "training": training}


def train_sherd(sherd, settings, scratch, *more):
    (scratch / "config.json").write_text(json.dumps(settings))
    run(sherd, "train", "--config", scratch / "config.json", "--metrics", scratch / "metrics.jsonl", *more)
    steps = []
    for line in (scratch / "metrics.jsonl").read_text().splitlines():
        each = json.loads(line)
        found = {"loss": each["loss"], "grad_norm": each["grad_norm"], **each["objective"]}
        if "rewards/chosen" in found:
            found["rewards/mean"] = (found["rewards/chosen"] + found["rewards/rejected"]) / 2
        steps.append(found)
    return steps


def first_adapter(sherd, settings, scratch):
    """As this program begins one of these settings."""
    run_dir, out = scratch / "begun", scratch / "adapter"
    settings = json.loads(json.dumps(settings))
    settings["training"]["save_dir"] = str(run_dir)
    settings["optimizer"]["params"]["lr"] = 0
    train_sherd(sherd, settings, scratch, "--steps", "1")
    run(sherd, "export", run_dir, "--output", out, "--adapter")
    return out


def weights_of(sherd, case, settings, scratch):
    out = scratch / "exported"
    run(sherd, "export", settings["training"]["save_dir"], "--output", out, *(["--adapter"] if case.adapter else []))
    if case.adapter:
        return safetensors.torch.load_file(out / "adapter_model.safetensors")
    kind = transformers.AutoModelForSequenceClassification if case.objective == "reward" \
        else transformers.AutoModelForCausalLM
    return kind.from_pretrained(out, dtype=torch.float32).state_dict()


def ids_here(prefix):
    """The same of what `sherd prepare` wrote. Of a text that is judged by itself, the other side has one token."""
    index = prefix.with_suffix(".idx").read_bytes()
    sizes = numpy.frombuffer(index, dtype=numpy.int32, offset=34, count=int.from_bytes(index[18:26], "little"))
    there = numpy.repeat(sizes > 1, sizes)
    ids = numpy.fromfile(prefix.with_suffix(".bin"), dtype=numpy.uint16)
    marks = numpy.unpackbits(numpy.fromfile(prefix.with_suffix(".mask"), dtype=numpy.uint8), bitorder="little")
    return ids[there].tolist(), marks[:len(ids)][there].tolist()


# ---- both ----

def column(key):
    return {"loss": "loss", "grad_norm": "norm"}.get(key, "metrics")


def differences(case, found, wanted):
    """(step, key, by how much) of what both have."""
    for step, (ours, theirs) in enumerate(zip(found, wanted)):
        for key in sorted(set(ours) & set(theirs)):
            if step > 0 or key != "rewards/accuracies" or not case.has_reference():
                yield step, key, abs(ours[key] - theirs[key]) / max(1, abs(theirs[key]))


def check(sherd, name, scratch):
    case = CASES[name]
    tokenizer = make_tokenizer(scratch / "tokenizer")
    load = make_model(case, tokenizer, scratch / "base")
    lines, problems = lines_of(case), []
    (scratch / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(sherd, "prepare", "--input", scratch / "lines.jsonl", "--tokenizer", f"hf:{scratch / 'base'}", "--output",
        scratch / "data")
    adapter = scratch / "adapter"
    settings = settings_of(case, scratch / "base", adapter, scratch, False)
    if case.adapter == "ours":
        first_adapter(sherd, settings, scratch)
    elif case.adapter:
        make_adapter(case, load(), adapter)

    theirs, their_weights, dataset = train_trl(case, lines, tokenizer, load, adapter, scratch)
    (ids, answers), (our_ids, our_answers) = ids_of(dataset), ids_here(scratch / "data")
    if our_ids != ids:
        problems.append(f"ids: {len(our_ids)} here, {len(ids)} of TRL")
    elif case.objective != "reward" and our_answers != answers:
        problems.append("which tokens are answers")

    largest = dict.fromkeys(ALLOWED, 0.0)

    def see(kind, difference, problem):
        largest[kind] = max(largest[kind], difference)
        if not difference <= ALLOWED[kind]:
            problems.append(problem)

    ours = train_sherd(sherd, settings, scratch)
    if len(ours) != len(theirs) or len(ours) != STEPS:
        problems.append(f"{len(ours)} steps, {len(theirs)} of TRL")
    for step, key, difference in differences(case, ours, theirs):
        see(column(key), difference, f"step {step + 1}: {key} {ours[step][key]:.8g}, of TRL {theirs[step][key]:.8g}")

    our_weights = weights_of(sherd, case, settings, scratch)
    begun = safetensors.torch.load_file(adapter / "adapter_model.safetensors") if case.adapter else load().state_dict()
    if sorted(our_weights) != sorted(their_weights):
        problems.append(f"names of weights: {sorted(set(our_weights) ^ set(their_weights))[:4]}")
    same = [key for key in their_weights if key in our_weights]
    moved = max((their_weights[key] - begun[key]).abs().max().item() for key in same)
    apart = max((their_weights[key] - our_weights[key]).abs().max().item() for key in same)
    see("weights", apart / moved, f"weights differ by {apart:.2g}, where they moved by {moved:.2g}")

    if case.packed:
        packed = train_sherd(sherd, settings_of(case, scratch / "base", adapter, scratch, True), scratch)
        for step, key, difference in differences(case, packed, ours):
            see("norm" if key == "grad_norm" else "packed", difference,
                f"step {step + 1}: {key} {packed[step][key]:.8g} packed, else {ours[step][key]:.8g}")
    said = [f"{value:9.1e}" if kind != "packed" or case.packed else " " * 9 for kind, value in largest.items()]
    print(f"{name:18} {' '.join(said)} {moved:8.1e}  {'FAILED' if problems else 'ok'}", flush=True)
    for problem in problems[:12]:
        print("    " + problem)
    return not problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sherd", default=ROOT / "build/sherd")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("trl").setLevel(logging.ERROR)
    print(f"{'':18} {' '.join(f'{kind:>9}' for kind in ALLOWED)} {'moved':>8}")
    good = True
    for name in options.cases or list(CASES):
        with tempfile.TemporaryDirectory() as scratch:
            good &= check(options.sherd, name, pathlib.Path(scratch))
    sys.exit(not good)


if __name__ == "__main__":
    main()
