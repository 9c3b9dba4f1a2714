#!/usr/bin/env python3
"""Makes tests/engine/reference/preference_losses.json: what TRL's trainers make of given log-probabilities.

The loss methods of DPOTrainer, CPOTrainer, ORPOTrainer, KTOTrainer and RewardTrainer run as they are, on
objects that were not initialised and have the attributes that the methods read, and on models that say what
was drawn here. All is double, as float() is made to mean that, but for alpha_divergence, which TRL has none
for.

"texts" are lists by name, of pairs, chosen before rejected, or of texts that are judged by themselves: the
side, the log-probability of each target (or the reward), and the reference's sum. "cases" have the keys of
section training.preference that ask for the same, the loss, its derivatives by what is given of each text
(one number: all its targets have it), TRL's metrics of names that Sherd has, and KTO's baseline.

Needs torch and trl 1.16. Usage: make_preference_reference.py [OUTPUT_FILE]
"""
import collections
import json
import pathlib
import random
import sys
import types
import warnings

warnings.filterwarnings("ignore")
import torch  # noqa: E402
import trl  # noqa: E402
from trl.experimental.cpo import CPOTrainer  # noqa: E402
from trl.experimental.orpo import ORPOTrainer  # noqa: E402
from trl.trainer.dpo_trainer import DPOTrainer  # noqa: E402
from trl.trainer.kto_trainer import KTOTrainer  # noqa: E402
from trl.trainer.reward_trainer import RewardTrainer  # noqa: E402

OUTPUT = pathlib.Path(__file__).resolve().parents[2] / "tests/engine/reference/preference_losses.json"
METRICS = ["rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen",
           "logps/rejected", "nll_loss", "kl"]
DRAW = random.Random(116)


def rounded(x):
    """To what fp32 holds, too, as its sums."""
    return round(x * 64) / 64


def drawn(side, targets, unlikely=4.0, apart=4.0):
    log_probs = [rounded(-0.05 - unlikely * DRAW.random() ** 2) for _ in range(targets)]
    reference = min(rounded(sum(log_probs) + apart * DRAW.gauss(0, 1)), -1 / 64)
    return {"side": side, "log_probs": log_probs, "reference": reference}


def told(side, log_probs, ratio):
    return {"side": side, "log_probs": log_probs, "reference": sum(log_probs) - ratio}


# Pairs whose margins are 60 and -60, and answers that are as likely or unlikely.
FAR = [told(1, [-0.5, -0.25, -1.25], 30), told(-1, [-31.0, -31.0], -30),
       told(1, [-30.0, -32.0], -30), told(-1, [-1.0, -0.5, -0.25, -0.25], 30)]
LENGTHS = [(2, 9), (5, 3), (4, 4), (9, 6), (7, 8), (3, 2)]
TEXTS = {
    "pairs": [drawn(side, n, unlikely) for (a, b), unlikely in zip(LENGTHS, (4, 1, 4, 2, 0.5, 6))
              for side, n in ((1, a), (-1, b))],
    "far": FAR,
    "singles": [drawn(side, n) for side, n in zip((1, -1, 1, 1, -1, 1, -1, 1), (4, 2, 9, 3, 7, 5, 6, 2))],
    "rewards": [{"side": side, "log_probs": [rounded(2 * DRAW.gauss(0, 1))]} for side in (1, -1) * 6],
    "far_rewards": [{"side": side, "log_probs": [x]} for side, x in ((1, 30.0), (-1, -30.0),
                                                                     (1, -30.0), (-1, 30.0))],
}


def digits(x):
    """Fewer than a double has, so that rounding in TRL does not tell apart what is the same."""
    return float(f"{x:.13g}")


def made(trainer, **given):
    """An object with the trainer's methods and these attributes."""
    self = trainer.__new__(trainer)
    same = lambda x: x
    vars(self).update(
        model=types.SimpleNamespace(training=True), aux_loss_enabled=False, precompute_ref_logps=True,
        accelerator=types.SimpleNamespace(device=torch.device("cpu"), gather=same, gather_for_metrics=same),
        _metrics={"train": collections.defaultdict(list)}, _total_train_tokens=0, _tp_size=1, **given)
    return self


class Rows:
    """Texts as rows of a batch, behind as many tokens of a prompt, the first of which is the row's number.
    Tokens of answers are 1, others 0. `fill` stands where there is no target."""

    def __init__(self, texts, prompt, fill, dtype=None):
        length = prompt + max(len(t["log_probs"]) for t in texts)
        self.mask = torch.zeros(len(texts), length, dtype=torch.int64)
        self.attention = torch.zeros_like(self.mask)
        self.log_probs = torch.full((len(texts), length - 1), fill, dtype=dtype)
        for i, text in enumerate(texts):
            end = prompt + len(text["log_probs"])
            self.mask[i, prompt:end] = 1
            self.attention[i, :end] = 1
            self.log_probs[i, prompt - 1:end - 1] = torch.tensor(text["log_probs"])
        self.log_probs.requires_grad_()
        self.ids = self.mask.clone()
        self.ids[:, 0] = torch.arange(len(texts))
        self.reference = torch.tensor([t["reference"] for t in texts], dtype=dtype)

    def model(self, input_ids, **_):
        """What the fused head of trl gives, and logits of two tokens with these probabilities."""
        log_probs = self.log_probs[input_ids[:, 0]]
        nothing = torch.zeros_like(log_probs)
        others = torch.log(-torch.expm1(torch.where(log_probs < 0, log_probs, -1.0)))
        logits = torch.nn.functional.pad(torch.stack([others, log_probs], dim=-1), (0, 0, 0, 1))
        return types.SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing,
                                     is_top1=nothing.bool(), logits=logits)

    def gradients(self):
        """Of each text, by target; one number where all are the same."""
        out = []
        for row, mask in zip(self.log_probs.grad, self.mask[:, 1:]):
            values = [digits(x) for x in row[mask.bool()].tolist()]
            out.append(values[:1] if len(set(values)) == 1 else values)
        return out


def pairs_apart(texts):
    """The chosen ones, then the rejected ones, as trl has them; and back."""
    order = [i for side in (1, -1) for i, t in enumerate(texts) if t["side"] == side]
    return [texts[i] for i in order], lambda values: [values[order.index(i)] for i in range(len(texts))]


def dpo(texts, keys, losses, weights):
    single = keys.get("f_divergence_type") == "alpha_divergence"
    apart, back = pairs_apart(texts)
    rows = Rows(apart, 2, 0.0, torch.float32 if single else torch.float64)
    chosen, rejected = rows.reference.chunk(2)
    self = made(DPOTrainer, loss_types=losses, loss_weights=weights, beta=keys["beta"],
                label_smoothing=keys.get("label_smoothing", 0.0), ld_alpha=keys.get("ld_alpha"),
                use_weighting=False, f_divergence_type=keys.get("f_divergence_type", "reverse_kl"),
                f_alpha_divergence_coef=keys.get("f_alpha_divergence_coef"),
                args=types.SimpleNamespace(discopop_tau=keys.get("discopop_tau", 0.05)))
    loss = self._compute_loss(rows.model, {
        "input_ids": rows.ids, "attention_mask": rows.attention, "completion_mask": rows.mask,
        "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}, False)
    loss.backward()
    found = {"fp32": True} if single else {}
    return {**found, "loss": loss.item(), "gradients": back(rows.gradients()), "metrics": last(self)}


def last(self):
    return {name: values[-1] for name, values in self._metrics["train"].items()}


def without_reference(trainer, texts, **given):
    """CPO's and ORPO's; a prompt is one token, so that ORPO's own loss of it is none."""
    apart, back = pairs_apart(texts)
    rows = Rows(apart, 1, -0.7)
    labels = rows.ids.masked_fill(rows.mask == 0, -100)
    self = made(trainer, pad_token_id=0, padding_value=0, is_encoder_decoder=False, **given)
    half = len(texts) // 2
    batch = {}
    for side, which in (("chosen", slice(half)), ("rejected", slice(half, None))):
        batch |= {f"{side}_input_ids": rows.ids[which], f"{side}_attention_mask": rows.attention[which],
                  f"{side}_labels": labels[which]}
    loss, metrics = self.get_batch_loss_metrics(rows.model, batch)
    loss.backward()
    return {"loss": loss.item(), "gradients": back(rows.gradients()), "metrics": metrics}


def cpo(texts, keys, loss_type, cpo_alpha):
    found = without_reference(CPOTrainer, texts, loss_type=loss_type, beta=keys["beta"], alpha=0.0,
                              label_smoothing=keys.get("label_smoothing", 0.0), cpo_alpha=cpo_alpha,
                              simpo_gamma=keys.get("simpo_gamma", 0.5))
    if cpo_alpha == 0:
        del found["metrics"]["nll_loss"]  # is not computed
    return found


def orpo(texts, keys):
    return without_reference(ORPOTrainer, texts, beta=keys["beta"])


def kto(texts, keys, mismatched):
    """mismatched: what of the reference's log-ratios of as many others, whose mean is the baseline."""
    loss_type = keys.get("loss_type", "kto")
    others = [told(0, t["log_probs"], ratio) for t, ratio in zip(texts, mismatched)]
    rows = Rows(texts + others, 2, 0.0)
    n = len(texts)
    self = made(KTOTrainer, loss_type=loss_type, beta=keys["beta"], calculate_KL=loss_type == "kto",
                desirable_weight=keys["desirable_weight"], undesirable_weight=keys["undesirable_weight"])
    loss = self._compute_loss(rows.model, {
        "input_ids": rows.ids[:n], "KL_input_ids": rows.ids[n:],
        "attention_mask": rows.attention[:n], "KL_attention_mask": rows.attention[n:],
        "completion_mask": rows.mask[:n], "KL_completion_mask": rows.mask[n:],
        "label": torch.tensor([t["side"] > 0 for t in texts]),
        "ref_logps": rows.reference[:n], "ref_KL_logps": rows.reference[n:]}, False)
    loss.backward()
    return {"baseline": last(self)["kl"], "loss": loss.item(), "gradients": rows.gradients()[:n],
            "metrics": last(self)}


def reward(texts, keys):
    apart, back = pairs_apart(texts)
    rewards = torch.tensor([t["log_probs"] for t in apart], requires_grad=True)
    self = made(RewardTrainer,
                args=types.SimpleNamespace(center_rewards_coefficient=keys.get("center_rewards_coefficient")))
    loss = self.compute_loss(lambda **_: types.SimpleNamespace(logits=rewards),
                             {"attention_mask": torch.ones_like(rewards)})
    loss.backward()
    metrics = {"rewards/accuracies": last(self)["accuracy"], "rewards/margins": last(self)["margin"]}
    return {"loss": loss.item(), "gradients": back([[digits(x)] for x, in rewards.grad.tolist()]),
            "metrics": metrics}


LOSSES = [("sigmoid", {}), ("hinge", {}), ("ipo", {}), ("exo_pair", {"label_smoothing": 0.001}),
          ("exo_pair", {"label_smoothing": 0.1}), ("nca_pair", {}), ("robust", {"label_smoothing": 0.1}),
          ("bco_pair", {}), ("sppo_hard", {}), ("aot", {}), ("aot", {"label_smoothing": 0.1}),
          ("aot_unpaired", {}), ("aot_unpaired", {"label_smoothing": 0.1}), ("apo_zero", {}),
          ("apo_down", {}), ("discopop", {}), ("sft", {}), ("sigmoid_norm", {})]


def cases():
    """(objective, texts, keys, what computes it)"""
    def of_dpo(texts, loss, keys, more=None, weights=(1.0,)):
        keys = {"loss_type": loss, **keys}
        losses = loss if isinstance(loss, list) else [loss]
        return "dpo", texts, {**keys, **(more or {})}, lambda t: dpo(t, keys, losses, list(weights))

    for beta in (0.1, 0.4):
        for loss, keys in LOSSES:
            yield of_dpo("pairs", loss, {"beta": beta, **keys})
    for loss, keys in LOSSES:
        if loss != "sft":
            yield of_dpo("far", loss, {"beta": 1.0, **keys})
    yield of_dpo("pairs", "discopop", {"beta": 0.1, "discopop_tau": 0.5})
    mixed = ["sigmoid", "sft"]
    for more in ({}, {"ld_alpha": 0.5}):
        yield of_dpo("pairs", mixed, {"beta": 0.1, **more}, {"loss_weights": [1, 0.3]}, (1, 0.3))
    # rpo_alpha says the same.
    keys = {"beta": 0.4}
    yield "dpo", "pairs", {**keys, "rpo_alpha": 0.3}, lambda t: dpo(t, keys, mixed, [1, 0.3])
    several, weights = ["aot", "bco_pair", "sft"], [0.5, 2, 0]
    yield of_dpo("pairs", several, {"beta": 0.4}, {"loss_weights": weights}, weights)
    for loss in ("sigmoid", "ipo", "aot", "sppo_hard"):
        yield of_dpo("pairs", loss, {"beta": 0.4, "ld_alpha": 0.5})
    yield of_dpo("pairs", "sigmoid", {"beta": 0.1, "ld_alpha": 0.0})
    divergences = [{"f_divergence_type": "forward_kl"}, {"f_divergence_type": "js_divergence"}]
    for coefficient in (0.5, 0.3, 1):
        divergences.append({"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": coefficient})
    for divergence in divergences:
        for loss in ("sigmoid", "hinge"):
            yield of_dpo("pairs", loss, {"beta": 0.1, **divergence})
    for loss, keys in LOSSES:
        if loss in ("ipo", "robust", "discopop", "sigmoid_norm") or keys.get("label_smoothing") == 0.001:
            yield of_dpo("pairs", loss, {"beta": 0.4, **keys, **divergences[1]})
    yield of_dpo("far", "sigmoid", {"beta": 1.0, **divergences[1]})
    # Of exponents that are clamped to 80.
    clamped = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 4}
    yield of_dpo("far", "sigmoid", {"beta": 1e-34, **clamped})

    for texts, beta in (("pairs", 0.1), ("pairs", 0.4), ("far", 1.0)):
        for keys in ({"beta": beta}, {"beta": beta, "label_smoothing": 0.1, "cpo_alpha": 0.3}):
            yield "cpo", texts, keys, lambda t, keys=keys: cpo(t, keys, "sigmoid", keys.get("cpo_alpha", 1.0))
        keys = {"beta": beta}
        yield "orpo", texts, keys, lambda t, keys=keys: orpo(t, keys)
    yield "cpo", "pairs", {"beta": 0.4, "cpo_alpha": 0}, lambda t: cpo(t, {"beta": 0.4}, "sigmoid", 0)
    for texts, keys in (("pairs", {"beta": 2.0}), ("pairs", {"beta": 2.5, "simpo_gamma": 1.4}),
                        ("pairs", {"beta": 2.0, "simpo_gamma": 0, "label_smoothing": 0.1}),
                        ("far", {"beta": 2.0})):
        yield "simpo", texts, keys, lambda t, keys=keys: cpo(t, keys, "simpo", 0)
    # CPO-SimPO has both.
    yield "simpo", "pairs", {"beta": 2.0, "rpo_alpha": 0.3}, lambda t: cpo(t, {"beta": 2.0}, "simpo", 0.3)

    above, below = (3, -1, 2.5, 0.5, 4, -2, 1, 0.25), (-3, 1, -2.5, -0.5, 1, -2, 1, -0.25)
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.7}
    for keys in ({"loss_type": "kto"}, {"loss_type": "apo_zero_unpaired"}):
        for beta, texts, others in ((0.1, "singles", above), (0.4, "singles", above), (0.4, "singles", below),
                                    (1.0, "far", above)):
            given = {"beta": beta, **keys, **weights}
            if others is above or keys["loss_type"] == "kto":
                yield "kto", texts, given, lambda t, given=given, others=others: kto(t, given, others)

    for texts in ("rewards", "far_rewards"):
        for keys in ({}, {"center_rewards_coefficient": 0.01}):
            yield "reward", texts, keys, lambda t, keys=keys: reward(t, keys)


def main():
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    lines = []
    for objective, texts, keys, compute in cases():
        found = compute(TEXTS[texts])
        metrics = {name: digits(found["metrics"][name]) for name in METRICS if name in found["metrics"]}
        values = [digits(found["loss"]), *metrics.values(), *sum(found["gradients"], [])]
        assert all(abs(x) < 1e30 for x in values), keys
        lines.append({"objective": objective, "texts": texts, "preference": keys, **found,
                      "loss": digits(found["loss"]), "metrics": metrics})
    write = lambda x: json.dumps(x, separators=(",", ":"))
    texts = ",\n".join(f'"{name}":{write(of)}' for name, of in TEXTS.items())
    path = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    path.write_text(f'{{"trl":"{trl.__version__}","texts":{{\n{texts}}},\n"cases":[\n'
                    + ",\n".join(write(line) for line in lines) + "\n]}\n")
    print(len(lines), "cases,", path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
