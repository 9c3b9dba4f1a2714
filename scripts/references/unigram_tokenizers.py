"""Small unigram tokenizers with the structure of public ones, for make_tokenizer_reference.py.

SentencePiece trains them, with a table of replacements of its own kind: the rules of its nmt_nfkc, of few characters, or
with full=True all of them. Needs sentencepiece and tokenizers.
"""
import base64
import io
import pathlib
import tempfile
import unicodedata

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

MARK = "\u2581"


def rules(texts):
    """Of the characters of the texts, and their pairs with a mark, what NFKC makes of them; and SentencePiece's own."""
    out = {chr(c): "" for c in [*range(1, 9), 0xb, *range(0xe, 0x20), 0x7f]}
    out |= {c: " " for c in "\t\n\f\r\u1680\u200b\u200d\u200e\u2028\u2029\ufeff\ufffd"}
    characters = sorted({c for text in texts for c in text})
    pairs = {a + b for text in texts for a, b in zip(text, text[1:]) if unicodedata.combining(b)}
    for text in characters + sorted(pairs):
        made = unicodedata.normalize("NFKC", text)
        if made != text and text not in out and (len(text) == 1 or len(made) == 1):
            out[text] = made
    return out


def trained(texts, size, full=False, **more):
    """A SentencePiece model, and its table of replacements."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "rules.tsv")
        hexadecimal = lambda text: " ".join(f"{ord(c):X}" for c in text)
        if not full:
            path.write_text("".join(f"{hexadecimal(a)}\t{hexadecimal(b)}\n" for a, b in rules(texts).items()))
        rule = {"normalization_rule_name": "nmt_nfkc"} if full else {"normalization_rule_tsv": str(path)}
        writer = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([line for text in texts for line in text.splitlines()]), model_writer=writer, vocab_size=size,
            model_type="unigram", num_threads=1, minloglevel=2, character_coverage=0.98, hard_vocab_limit=False, **rule, **more)
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(writer.getvalue())
    return [(piece.piece, round(piece.score, 4)) for piece in model.pieces], model.normalizer_spec.precompiled_charsmap


def of_few(texts):
    """The texts without those of Asia, so that much is unknown."""
    return [text for text in texts if not any(0x900 <= ord(c) < 0x1e00 or 0x3000 <= ord(c) < 0xfb00 for c in text)]


def with_template(tok, single, *tokens):
    tok.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B {tokens[-1]}", special_tokens=[(token, tok.token_to_id(token)) for token in tokens])
    return tok


def words():
    return pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(MARK, prepend_scheme="always")])


def t5(texts, size=900, full=False):
    """As transformers 5 writes T5's."""
    pieces, charsmap = trained(texts, size, full, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    extra = [f"<extra_id_{i}>" for i in range(99, -1, -1)]
    tok = Tokenizer(models.Unigram(pieces + [(token, 0.0) for token in extra], unk_id=2, byte_fallback=False))
    tok.normalizer = normalizers.Precompiled(charsmap)
    tok.pre_tokenizer = words()
    tok.decoder = decoders.Metaspace(MARK, prepend_scheme="always")
    tok.add_special_tokens(["<pad>", "</s>", "<unk>", *extra])
    return with_template(tok, "$A </s>", "</s>")


def mt5(texts, size=800, full=False):
    """As older ones wrote mT5's, and with byte pieces: whole words of any white space, runs of spaces, no special <unk>."""
    pieces, charsmap = trained(of_few(texts), size, full, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, byte_fallback=True)
    tok = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.Precompiled(charsmap), normalizers.Replace(Regex(" {2,}"), " ")])
    tok.pre_tokenizer = pre_tokenizers.Metaspace(MARK, prepend_scheme="always")
    tok.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(MARK, prepend_scheme="always")])
    tok.add_special_tokens(["</s>"])
    return with_template(tok, "$A </s>", "</s>")


def xlm_roberta(texts, size=800, full=False):
    """XLM-R's own four in front, and <mask> behind, which takes the space before it; one sentence is one text to the model."""
    pieces, charsmap = trained(texts, size, full)
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *pieces[3:], ("<mask>", 0.0)]
    tok = Tokenizer(models.Unigram(pieces, unk_id=3, byte_fallback=False))
    tok.normalizer = normalizers.Sequence([normalizers.Precompiled(charsmap), normalizers.Strip(left=False, right=True),
                                           normalizers.Replace(Regex(" {2,}"), MARK)])
    tok.pre_tokenizer = pre_tokenizers.Metaspace(MARK, prepend_scheme="first", split=False)
    tok.decoder = decoders.Metaspace(MARK, prepend_scheme="first", split=False)
    tok.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True, normalized=False)])
    return with_template(tok, "<s> $A </s>", "<s>", "</s>")


def albert(texts, size=500, full=False):
    pieces, charsmap = trained([unicodedata.normalize("NFKD", text).lower() for text in of_few(texts)], size, full, pad_id=0,
                               unk_id=1, bos_id=-1, eos_id=-1, control_symbols=["[CLS]", "[SEP]"],
                               user_defined_symbols=["[MASK]"])
    tok = Tokenizer(models.Unigram(pieces, unk_id=1, byte_fallback=False))
    tok.normalizer = normalizers.Sequence([
        normalizers.Replace("``", '"'), normalizers.Replace("''", '"'), normalizers.NFKD(), normalizers.StripAccents(),
        normalizers.Lowercase(), normalizers.Precompiled(charsmap), normalizers.Replace(Regex(" {2,}"), " ")])
    tok.pre_tokenizer = words()
    tok.decoder = decoders.Metaspace(MARK, prepend_scheme="always")
    tok.add_special_tokens(["<pad>", "<unk>", "[CLS]", "[SEP]", AddedToken("[MASK]", lstrip=True, normalized=False)])
    return with_template(tok, "[CLS] $A [SEP]", "[CLS]", "[SEP]")


FAMILIES = {"t5": t5, "mt5": mt5, "xlm_roberta": xlm_roberta, "albert": albert}
