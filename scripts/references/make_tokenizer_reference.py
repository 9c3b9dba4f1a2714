#!/usr/bin/env python3
"""Makes tests/data/tokenizers: small tokenizers with the structure of public ones, and what they make of hard text.

Each NAME.json is a tokenizer.json that the tokenizers package trained on text of this file. texts.txt has a text per
line, as hexadecimal digits of its bytes (some are no UTF-8), NAME.txt the ids that the package gives for it, decoded with
errors="replace", and the text that it makes of these ids; "=" is the decoded text itself, "-" nothing, and "?" one with
U+FFFD that the text does not have: the package puts it for bytes that Sherd leaves as they are.

Needs tokenizers and sentencepiece; nothing that Sherd builds, tests or runs needs this file.
Usage: make_tokenizer_reference.py [FOLDER [NAME...]]
"""
import json
import pathlib
import random
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import unigram_tokenizers

# A sentence or two in many scripts.
SCRIPTS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? I'll say: we've seen 12345 of them.",
    "Дай бог каждому по 1000 рублей, сказал он — и ушёл. Съешь ещё этих мягких французских булок.",
    "Η γρήγορη αλεπού πηδάει πάνω από το τεμπέλικο σκυλί. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "הכלב העצלן ישן כל היום. שָׁלוֹם עֲלֵיכֶם, מה שלומך?",
    "الكلب الكسول نام طوال اليوم. السَّلَامُ عَلَيْكُمْ، كيف حالك؟ ١٢٣٤٥",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है। क्षत्रिय ज्ञान १२३",
    "দ্রুত বাদামী শিয়াল অলস কুকুরের উপর লাফ দেয়। ক্ষমা করো ১২৩",
    "விரைவான பழுப்பு நரி சோம்பேறி நாயின் மீது குதிக்கிறது. க்ஷமி",
    "త్వరిత గోధుమ నక్క సోమరి కుక్కపై దూకుతుంది.",
    "ವೇಗದ ಕಂದು ನರಿ ಸೋಮಾರಿ ನಾಯಿಯ ಮೇಲೆ ಹಾರುತ್ತದೆ.",
    "വേഗത്തിലുള്ള തവിട്ടുനിറത്തിലുള്ള കുറുക്കൻ മടിയനായ നായയുടെ മുകളിലൂടെ ചാടുന്നു.",
    "ઝડપી ભૂરું શિયાળ આળસુ કૂતરા પર કૂદે છે.",
    "ਤੇਜ਼ ਭੂਰੀ ਲੂੰਬੜੀ ਆਲਸੀ ਕੁੱਤੇ ਉੱਤੇ ਛਾਲ ਮਾਰਦੀ ਹੈ।",
    "สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจ ๑๒๓",
    "ໝາຈິ້ງຈອກສີນ້ຳຕານໂດດຂ້າມໝາຂີ້ຄ້ານ",
    "ខ្ញុំស្រឡាញ់ភាសាខ្មែរ។",
    "မြန်မာဘာသာစကားသည် လှပသည်။",
    "敏捷的棕色狐狸跳过了懒狗。她说：“你好，世界！”共有一万二千三百四十五个。",
    "素早い茶色の狐がのろまな犬を飛び越える。カタカナとひらがな、そして漢字。ﾊﾝｶｸ",
    "재빠른 갈색 여우가 게으른 개를 뛰어넘는다. 한국어 문장입니다.",
    "სწრაფი ყავისფერი მელა ზარმაც ძაღლს ახტება.",
    "Արագ շագանակագույն աղվեսը ցատկում է ծույլ շան վրայով։",
    "ፈጣን ቡናማ ቀበሮ ሰነፍ ውሻ ላይ ዘለለ።",
    "Nhanh như chớp, con cáo nâu nhảy qua con chó lười. Tiếng Việt có dấu.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. İstanbul'da ığdır. Straße, œuvre, ﬁnal.",
    "བོད་སྐད་ནི་ཡག་པོ་རེད།",
    "ᠮᠣᠩᠭᠣᠯ ᠪᠢᠴᠢᠭ᠌ ᠃",
    "ସେ ଘରକୁ ଗଲା। සිංහල භාෂාව ලස්සනයි.",
]
CODE = [
    "def f(x):\n    if x > 0:\n\t\treturn {'a': [1, 2.5e-3], \"b\": None}\n\n\n    return x ** 2  # TODO\n",
    "#include <vector>\r\nint main() { std::vector<int> v{1,2,3}; for (auto& x : v) x <<= 1; return 0; }\r\n",
    "SELECT * FROM t WHERE a_b <> 'it''s' AND c >= 10;\n<div class=\"x y\">&nbsp;</div>\n$\\frac{a}{b}$ != ```",
]
SYMBOLS = [
    "🙂👍🏽👩‍👩‍👧‍👦🇩🇪🏴󠁧󠁢󠁥󠁮󠁧󠁿 ❤️ ☃ ™ ①②③ Ⅷ ½ ² ₃ €100 £5.99 ¥ ₹ ∑∫√∞≠≤ → ⇒ █▓▒░ 𝔘𝔫𝔦 𝒳 𐍈 𓀀",
    "e\u0301 \u00e9 \u1e9b\u0323 \u212b \uac00 \u1100\u1161\u11a8 q\u0307\u0323 \ufb01 \u0344 \u2126 \u0958 \uf900",
    "\u00a0\u2003\u3000\u200b\u200d\u202f\u2028\u2029\u0085\u180e\ufeff\u00ad\u1680\u205f x\u2009y",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "<0x41>", "<mask>", "word",
            "\u2581", "<|x|>", " <s>", "<pad>", "Ġ", "[INST]", "naïve"]


def hard_texts():
    rng = random.Random(7)
    out = ["", " ", "  ", "\n", "\n\n", " \n ", "\t\t", "a", " a", "a ", "  a  b   c", "\r\n\r\n  x\r", "I'M you'Re 'S 's''t",
           "it\u2019s don't 'LL ſ's '\u017f \u212a 'll", "0 12 123 1234 12345678901 ٣٤ ½Ⅷ²", "x" * 70 + " " * 40 + "y" * 33,
           "▁▁a▁b ▁ c▁", "Hello<s>World</s>!", "<s> a</s> b <s>", "a<mask> b  <mask>  c", "sword word words word.",
           "  word  word", "<|endoftext|><|endoftext|>x", "<|im_start|>user\nHi<|im_end|>\n", "<unk> <0x41><0xE2>",
           "NAÏVE nai\u0308ve naïve", "[INST] x [/INST]", "\ufffd \ufeffbom", "zero\0byte \x01\x7f",
           "日本語のみの長い文章" * 9, "no-break\u00a0space   \u3000wide  end  "]
    out += SCRIPTS + CODE + SYMBOLS
    pool = SCRIPTS + CODE + SYMBOLS
    for _ in range(60):
        parts = []
        for _ in range(rng.randint(2, 8)):
            text = rng.choice(pool)
            at = rng.randrange(len(text))
            parts.append(text[at:at + rng.randint(1, 14)])
            parts.append(rng.choice(["", " ", "  ", "\n", "\t", "\u00a0", "", "'s", "12", " " + rng.choice(SPECIALS), rng.choice(SPECIALS)]))
        out.append("".join(parts))
    raw = [text.encode() for text in out]
    raw += [b"invalid \xff\xfe bytes \xc3", b"\xed\xa0\x80 surrogate", b"overlong \xc0\xaf", b"cut \xf0\x9f\x99", b"\xf0\x9f\x99(\xe2\x82x",
            bytes(range(256)), b"\xf4\x90\x80\x80 \xf5 \xe0\x9f\xbf\xe0\xa0"]
    for _ in range(12):
        raw.append(bytes(rng.randrange(256) for _ in range(rng.randint(5, 60))))
    return raw


def corpus():
    return (SCRIPTS + CODE + SYMBOLS) * 3


def gpt2(texts, size=700):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|endoftext|>"], show_progress=False))
    tok.add_tokens([AddedToken("word", single_word=True), AddedToken("<mask>", lstrip=True, special=True, normalized=False)])
    return tok


LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")


def llama3(texts, size=800):
    tok = Tokenizer(models.BPE(ignore_merges=True))
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tok.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"])
    tok.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
        single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|> $B",
        special_tokens=[("<|begin_of_text|>", tok.token_to_id("<|begin_of_text|>"))])])
    return tok


def qwen(texts, size=700):
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tok.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tok.add_tokens([AddedToken("naïve", normalized=True), AddedToken("<|x|>", rstrip=True, normalized=False)])
    return tok


def llama2(metaspace, texts, size=1100):
    """With Metaspace, or with the normalizers that older files have in its place."""
    tok = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    mark = "\u2581"
    tok.normalizer = normalizers.Replace(" ", mark)
    tok.pre_tokenizer = pre_tokenizers.Split(mark, "merged_with_next")
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size, limit_alphabet=330, special_tokens=["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)],
        show_progress=False))
    state = json.loads(tok.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are tokens of the model alone
    # Older files number the merges as strings.
    if not metaspace:
        state["model"]["merges"] = [" ".join(pair) for pair in state["model"]["merges"]]
    tok = Tokenizer.from_str(json.dumps(state))
    strip = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tok.decoder = decoders.Sequence([decoders.Replace(mark, " ")] + strip)
    if metaspace:
        tok.normalizer = None
        tok.pre_tokenizer = pre_tokenizers.Metaspace(mark, prepend_scheme="first", split=False)
    else:
        tok.pre_tokenizer = None
        tok.normalizer = normalizers.Sequence([normalizers.Prepend(mark), normalizers.Replace(" ", mark)])
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tok.token_to_id("<s>"))])
    return tok


def variety(texts):
    """Parts that the others do not have, among them several behaviours of Split."""
    tok = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=False))
    tok.normalizer = normalizers.Sequence([
        normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(Regex(r"\s{2,}"), " "), normalizers.Strip()])
    steps = [pre_tokenizers.Split(Regex("[,;]+"), "removed"), pre_tokenizers.Split(Regex(r"[.!?\p{Han}[%]]"), "merged_with_previous"),
             pre_tokenizers.Split("-", "merged_with_next"), pre_tokenizers.Split(Regex("[^aeiou]"), "contiguous", invert=True),
             pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.Punctuation("isolated"),
             pre_tokenizers.Metaspace("_", prepend_scheme="always", split=True)]
    tok.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tok.decoder = decoders.Metaspace("_", prepend_scheme="always")
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=900, limit_alphabet=300, special_tokens=["<unk>", "</s>"], show_progress=False))
    tok.add_tokens([AddedToken("WORD", normalized=True, single_word=True, lstrip=True, rstrip=True)])
    return tok


BERT_SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def bert(texts, size=900, lowercase=True):
    tok = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=20))
    tok.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer() if lowercase else pre_tokenizers.Whitespace()
    tok.decoder = decoders.WordPiece()
    tok.train_from_iterator(texts, trainers.WordPieceTrainer(
        vocab_size=size, limit_alphabet=300, special_tokens=BERT_SPECIALS, show_progress=False))
    # The trainer leaves the limit out.
    state = json.loads(tok.to_str())
    state["model"]["max_input_chars_per_word"] = 20
    tok = Tokenizer.from_str(json.dumps(state))
    ids = {name: tok.token_to_id(name) for name in BERT_SPECIALS}
    tok.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"])) if lowercase else \
        processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[
            ("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])])
    return tok


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parents[2] / "tests/data/tokenizers")
    folder.mkdir(parents=True, exist_ok=True)
    texts = corpus()
    made = {"gpt2": gpt2(texts), "llama3": llama3(texts), "qwen": qwen(texts), "llama2": llama2(False, texts),
            "mistral": llama2(True, texts), "variety": variety(texts), "bert": bert(texts),
            "bert_cased": bert(texts, lowercase=False), **{name: make(texts) for name, make in unigram_tokenizers.FAMILIES.items()}}
    raw_texts = hard_texts()
    made = {name: tok for name, tok in made.items() if name in (sys.argv[2:] or made)}
    (folder / "texts.txt").write_text("".join(f"{raw.hex() or '-'}\n" for raw in raw_texts))
    for name, tok in made.items():
        state = json.dumps(json.loads(tok.to_str()), ensure_ascii=False, separators=(",", ":"))
        (folder / f"{name}.json").write_text(state + "\n")
        tok = Tokenizer.from_str(state)
        lines = []
        for raw in raw_texts:
            text = raw.decode(errors="replace")
            ids = tok.encode(text, add_special_tokens=False).ids
            decoded = tok.decode(ids)
            back = "=" if decoded == text else "?" if "\ufffd" in decoded and "\ufffd" not in text else decoded.encode().hex() or "-"
            lines.append(f"{','.join(map(str, ids)) or '-'} {back}\n")
        (folder / f"{name}.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
